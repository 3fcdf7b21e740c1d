// The whole runtime as one translation unit, which is compiled once.
#include "ordering.cpp"
#include "races.cpp"
#include "scheduler.cpp"
#include "undefined.cpp"
