// Race detection: finds accesses to memory that are not ordered. See races.cpp.
#pragma once

void begin_races();
void end_races();
// A block starts in this slot: no thread has accessed its __shared__ memory.
void forget_shared(unsigned slot);
