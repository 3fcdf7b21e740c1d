// The runtime in one translation unit, compiled once.
#include "ordering.cpp"
#include "races.cpp"
#include "scheduler.cpp"
#include "undefined.cpp"
