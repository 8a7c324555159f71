// Status and Result<T>: how every Argosy call reports failure. Values, never exceptions
// (contract 6.1).
//
// Codes are grouped by the largest thing that must be rebuilt before going on: the call, the
// handle, the group, the process (`radius_of`). Every message names values: shapes seen and
// expected, rank, peer, epoch, counter, have, want. On failure nothing is returned and outputs hold
// unspecified bytes.
//
// Test: tests/base/status_test.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace argosy {

enum class StatusCode : int32_t {
  kOk = 0,
  // Call: correct the arguments and call again; everything else stays usable.
  kInvalidArgument = 1,  // shape, dtype, value or setting outside the contract
  kNotFound = 2,         // file, tensor, key or preset that does not exist
  kCorruptData = 3,      // bytes from outside that break their own format
  kNonFinite = 4,        // NaN or Inf where on_nonfinite says error
  kCapacity = 5,         // a hard cap set by the caller would be exceeded; nothing has moved
  kUnsupported = 6,      // well-formed, but this build, CPU or format version cannot do it
  kIo = 7,               // the operating system refused a read or write
  // Handle: make the plan or handle again.
  kStalePlan = 20,  // plan of another group, shape, epoch or version
  // Group: leave the group and join a new one.
  kTimeout = 40,   // a deadline passed; the silent peers are named
  kPeerLost = 41,  // a peer has left or died
  kAborted = 42,   // another rank poisoned the group; its message is carried on
  kDisagree = 43,  // ranks were given different settings
  // Process: start again, with more memory or a fixed build.
  kOutOfMemory = 60,
  kInternal = 61,
};

enum class BlastRadius { kNone, kCall, kHandle, kGroup, kProcess };

// What must be rebuilt after `code`.
BlastRadius radius_of(StatusCode code);

// The code's name without the leading k, for example "InvalidArgument".
std::string_view name_of(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // "InvalidArgument: hidden has 63 columns, the layer has 64", or "Ok".
  std::string to_string() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value or the Status that says why there is none. Method names are those of std::expected.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    if (status_.ok()) status_ = Status(StatusCode::kInternal, "Result made from an ok Status");
  }

  bool has_value() const { return value_.has_value(); }
  explicit operator bool() const { return has_value(); }

  // Precondition of the next three: has_value().
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

  // Ok when has_value().
  const Status& error() const { return status_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace argosy

#define ARGOSY_CONCAT_INNER(a, b) a##b
#define ARGOSY_CONCAT(a, b) ARGOSY_CONCAT_INNER(a, b)

// The macros below take names and a declaration that cannot stand in parentheses.
// NOLINTBEGIN(bugprone-macro-parentheses)

// Returns the Status of `expression` from the enclosing function when it is not ok. The name is
// unique, so that an expression may hold a lambda that uses the macro too.
#define ARGOSY_RETURN_IF_ERROR(expression) \
  ARGOSY_RETURN_IF_ERROR_INNER(ARGOSY_CONCAT(argosy_status_, __COUNTER__), expression)
#define ARGOSY_RETURN_IF_ERROR_INNER(status, expression)        \
  do {                                                          \
    if (::argosy::Status status = (expression); !status.ok()) { \
      return status;                                            \
    }                                                           \
  } while (false)

// `declaration = value`, or returns the Result's error from the enclosing function.
#define ARGOSY_ASSIGN_OR_RETURN(declaration, expression) \
  ARGOSY_ASSIGN_OR_RETURN_INNER(ARGOSY_CONCAT(argosy_result_, __LINE__), declaration, expression)
#define ARGOSY_ASSIGN_OR_RETURN_INNER(result, declaration, expression) \
  auto result = (expression);                                          \
  if (!result.has_value()) return result.error();                      \
  declaration = std::move(result).value()

// NOLINTEND(bugprone-macro-parentheses)
