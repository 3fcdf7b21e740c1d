// Race detection: finds unordered memory accesses. See races.cpp.
#pragma once

void begin_races();
void end_races();
// Must be called when a block starts in this slot: no thread has accessed its __shared__ memory yet.
void forget_shared(unsigned slot);
