// Which accesses to memory are not ordered: see races.cpp.
#pragma once

void begin_races();
void end_races();
// A block starts in this slot: nobody has touched its __shared__ memory.
void forget_shared(unsigned slot);
