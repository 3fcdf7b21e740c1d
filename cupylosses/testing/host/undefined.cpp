// What -fsanitize=undefined calls when a kernel does what C++ does not define: the launch ends with the line.

#include <cstdint>

#include "scheduler.hpp"

namespace {
// Every call's first argument begins with this.
struct Place {
  const char* file;
  std::uint32_t line, column;
};

struct TypeMismatch {
  Place place;
  const void* type;
  unsigned char log_alignment, kind;
};

[[noreturn]] void found(const char* what, const Place* where) {
  fail((current ? name(*current) + ": " : std::string()) + what + " at " + place(where->file, where->line));
}
}  // namespace

extern "C" {
#define UNDEFINED(check, what)                                             \
  void __ubsan_handle_##check(const Place* where) { found(what, where); }   \
  void __ubsan_handle_##check##_abort(const Place* where) { found(what, where); }
UNDEFINED(add_overflow, "a signed sum overflows")
UNDEFINED(sub_overflow, "a signed difference overflows")
UNDEFINED(mul_overflow, "a signed product overflows")
UNDEFINED(negate_overflow, "a negation overflows")
UNDEFINED(divrem_overflow, "an integer is divided by zero, or overflows")
UNDEFINED(shift_out_of_bounds, "a shift by more than there are bits")
UNDEFINED(out_of_bounds, "an index beyond its array")
UNDEFINED(pointer_overflow, "a pointer overflows")
UNDEFINED(load_invalid_value, "a value that its type does not have")
UNDEFINED(float_cast_overflow, "a conversion of a number that does not fit")
UNDEFINED(vla_bound_not_positive, "an array without elements")
UNDEFINED(nonnull_arg, "a null pointer as an argument that is never null")
UNDEFINED(invalid_builtin, "zero where it has no meaning")
UNDEFINED(builtin_unreachable, "a place that is never reached")
UNDEFINED(missing_return, "a function without its result")
UNDEFINED(alignment_assumption, "an address that is not aligned")
#undef UNDEFINED

void __ubsan_handle_nonnull_return_v1(const void*, const Place* where) { found("a null result", where); }

void __ubsan_handle_type_mismatch_v1(const TypeMismatch* what, std::uintptr_t address) {
  if (!address) found("a null pointer", &what->place);
  const std::uintptr_t alignment = std::uintptr_t{1} << what->log_alignment;
  if (address & (alignment - 1)) found("an address that is not aligned", &what->place);
  found("an object that is too small", &what->place);
}
void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch* what, std::uintptr_t address) {
  __ubsan_handle_type_mismatch_v1(what, address);
}
}
