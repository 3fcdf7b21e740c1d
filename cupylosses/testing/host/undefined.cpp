// Handlers of -fsanitize=undefined: undefined behaviour in a kernel ends the launch and names the line.

#include <cstdint>

#include "scheduler.hpp"

namespace {
// The first argument of every handler starts with this struct.
struct Place {
  const char* file;
  std::uint32_t line, column;
};

struct TypeMismatch {
  Place place;
  const void* type;
  unsigned char log_alignment, kind;
};

// Ends the launch. Undefined behaviour in a load or store of the shim is reported at its caller, through `code`.
[[noreturn]] void found(const char* what, const Place* where, const void* code_address) {
  const std::string file = where->file;
  const bool shim = file.size() >= 8 && file.compare(file.size() - 8, 8, "shim.hpp") == 0;
  const std::string line = shim ? code(code_address) : place(where->file, static_cast<int>(where->line));
  fail((current ? name(*current) + ": " : std::string()) + what + " at " + line);
}
}  // namespace

extern "C" {
#define UNDEFINED(check, what)                              \
  void __ubsan_handle_##check(const Place* where) {         \
    found(what, where, __builtin_return_address(0));        \
  }                                                         \
  void __ubsan_handle_##check##_abort(const Place* where) { \
    found(what, where, __builtin_return_address(0));        \
  }
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

void __ubsan_handle_nonnull_return_v1(const void*, const Place* where) {
  found("a null result", where, __builtin_return_address(0));
}

#define TYPE_MISMATCH(handler)                                                 \
  void handler(const TypeMismatch* what, std::uintptr_t address) {             \
    const std::uintptr_t alignment = std::uintptr_t{1} << what->log_alignment; \
    found(!address                    ? "a null pointer"                       \
          : address & (alignment - 1) ? "an address that is not aligned"       \
                                      : "an object that is too small",         \
          &what->place, __builtin_return_address(0));                          \
  }
TYPE_MISMATCH(__ubsan_handle_type_mismatch_v1)
TYPE_MISMATCH(__ubsan_handle_type_mismatch_v1_abort)
#undef TYPE_MISMATCH
}
