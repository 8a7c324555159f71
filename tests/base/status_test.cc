// Status, Result, the two macros and ARGOSY_CHECK: every code has a name and one radius, errors
// pass through unchanged, values are moved and not copied.
#include "argosy/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/error.h"

namespace argosy {
namespace {

struct CodeRow {
  StatusCode code;
  int32_t number;  // crosses ranks and languages, so it must not change
  std::string_view name;
  BlastRadius radius;
};

constexpr CodeRow kCodes[] = {
    {StatusCode::kOk, 0, "Ok", BlastRadius::kNone},
    {StatusCode::kInvalidArgument, 1, "InvalidArgument", BlastRadius::kCall},
    {StatusCode::kNotFound, 2, "NotFound", BlastRadius::kCall},
    {StatusCode::kCorruptData, 3, "CorruptData", BlastRadius::kCall},
    {StatusCode::kNonFinite, 4, "NonFinite", BlastRadius::kCall},
    {StatusCode::kCapacity, 5, "Capacity", BlastRadius::kCall},
    {StatusCode::kUnsupported, 6, "Unsupported", BlastRadius::kCall},
    {StatusCode::kIo, 7, "Io", BlastRadius::kCall},
    {StatusCode::kStalePlan, 20, "StalePlan", BlastRadius::kHandle},
    {StatusCode::kTimeout, 40, "Timeout", BlastRadius::kGroup},
    {StatusCode::kPeerLost, 41, "PeerLost", BlastRadius::kGroup},
    {StatusCode::kAborted, 42, "Aborted", BlastRadius::kGroup},
    {StatusCode::kDisagree, 43, "Disagree", BlastRadius::kGroup},
    {StatusCode::kOutOfMemory, 60, "OutOfMemory", BlastRadius::kProcess},
    {StatusCode::kInternal, 61, "Internal", BlastRadius::kProcess},
};

TEST(StatusCodeTest, EveryCodeHasItsNumberNameAndOneRadius) {
  std::set<std::string_view> names;
  for (const CodeRow& row : kCodes) {
    EXPECT_EQ(static_cast<int32_t>(row.code), row.number) << row.name;
    EXPECT_EQ(name_of(row.code), row.name);
    EXPECT_EQ(radius_of(row.code), row.radius) << row.name;
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
  }
}

TEST(StatusCodeTest, TableAboveIsComplete) {
  // A number that name_of knows must stand in the table.
  std::set<int32_t> listed;
  for (const CodeRow& row : kCodes) listed.insert(row.number);
  for (int32_t number = -1000; number <= 1000; ++number) {
    const bool known = name_of(static_cast<StatusCode>(number)) != "Unknown";
    EXPECT_EQ(known, listed.contains(number)) << number;
  }
}

TEST(StatusTest, DefaultIsOk) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.to_string(), "Ok");
}

TEST(StatusTest, CarriesCodeAndMessage) {
  const Status status = base::invalid("hidden has {} columns, the layer has {}", 63, 64);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "hidden has 63 columns, the layer has 64");
  EXPECT_EQ(status.to_string(), "InvalidArgument: hidden has 63 columns, the layer has 64");
  EXPECT_EQ(base::error(StatusCode::kTimeout, "rank {}", 3).to_string(), "Timeout: rank 3");
}

TEST(ResultTest, ValueAndError) {
  Result<int> value = 7;
  EXPECT_TRUE(value.has_value());
  EXPECT_TRUE(static_cast<bool>(value));
  EXPECT_EQ(*value, 7);
  EXPECT_TRUE(value.error().ok());
  *value = 8;
  EXPECT_EQ(value.value(), 8);

  const Result<int> failed = Status(StatusCode::kNotFound, "no such tensor");
  EXPECT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().code(), StatusCode::kNotFound);
  EXPECT_EQ(failed.error().message(), "no such tensor");
}

TEST(ResultTest, OkStatusIsNoValue) {
  const Result<int> wrong = Status();
  EXPECT_FALSE(wrong.has_value());
  EXPECT_EQ(wrong.error().code(), StatusCode::kInternal);
}

TEST(ResultTest, HoldsTypesThatOnlyMove) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(5);
  EXPECT_EQ(**result, 5);
  const std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 5);
}

TEST(ResultTest, IsNodiscardAndHasNoImplicitBool) {
  static_assert(!std::is_convertible_v<Result<int>, bool>);
  static_assert(std::is_nothrow_move_constructible_v<Status>);
}

Status pass_through(const Status& status, int* steps) {
  ARGOSY_RETURN_IF_ERROR(status);
  ++*steps;
  return {};
}

TEST(MacroTest, ReturnIfErrorStopsAtErrorsOnly) {
  int steps = 0;
  EXPECT_TRUE(pass_through(Status(), &steps).ok());
  EXPECT_EQ(steps, 1);
  const Status failed = pass_through(Status(StatusCode::kIo, "disk"), &steps);
  EXPECT_EQ(failed.to_string(), "Io: disk");
  EXPECT_EQ(steps, 1);
}

TEST(MacroTest, ReturnIfErrorEvaluatesOnce) {
  int calls = 0;
  const auto once = [&calls]() {
    ++calls;
    return Status();
  };
  const auto body = [&once]() -> Status {
    if (true) ARGOSY_RETURN_IF_ERROR(once());  // stands without braces too
    return {};
  };
  EXPECT_TRUE(body().ok());
  EXPECT_EQ(calls, 1);
}

Result<std::unique_ptr<int>> make_number(bool ok) {
  if (!ok) return base::error(StatusCode::kCapacity, "have {}, want {}", 1, 2);
  return std::make_unique<int>(4);
}

Result<int> add_numbers(bool first, bool second) {
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<int> a, make_number(first));
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<int> b, make_number(second));
  return *a + *b;
}

TEST(MacroTest, AssignOrReturnMovesValuesAndPassesErrors) {
  EXPECT_EQ(*add_numbers(true, true), 8);
  EXPECT_EQ(add_numbers(false, true).error().to_string(), "Capacity: have 1, want 2");
  EXPECT_EQ(add_numbers(true, false).error().to_string(), "Capacity: have 1, want 2");
}

TEST(CheckDeathTest, PrintsConditionAndMessageThenAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const int have = 3;
  ARGOSY_CHECK(have == 3, "never printed");
  EXPECT_DEATH(ARGOSY_CHECK(have == 4, "have {}, want {}", have, 4),
               "status_test.cc:[0-9]+: check failed: have == 4: have 3, want 4");
}

}  // namespace
}  // namespace argosy
