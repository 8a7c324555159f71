// parse_plan: bytes of a peer or a file. What is accepted gives the same bytes again and can be used.
//
// The mutator keeps the hash right, so that the meaning is checked and not the hash alone. Guards
// src/plan/plan_serial.cc and the round arithmetic of plan.cc.
#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>

#include "argosy/plan.h"
#include "fuzz/fuzz_target.h"
#include "support/routing_cases.h"

namespace argosy::testing {
namespace {

constexpr size_t kHashBytes = 8;
// The plan, and the bytes it is written to again.
constexpr HeapBound kBound = {.peak = 4, .constant = 8192};

std::string check_round(const DispatchPlan& plan, int64_t round) {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  round_groups(plan, round, &offsets, &sizes);
  for (size_t group = 0; group < sizes.size(); ++group) {
    if (sizes[group] < 0 || offsets[group] < 0 || sizes[group] > plan.round_rows - offsets[group])
      return fmt::format("group {} of round {} leaves the buffer", group, round);
  }
  std::vector<int64_t> send;
  std::vector<int64_t> receive;
  round_traffic(plan, round, &send, &receive);
  const auto negative = [](int64_t rows) { return rows < 0; };
  if (std::any_of(send.begin(), send.end(), negative)) return "negative rows sent";
  if (std::any_of(receive.begin(), receive.end(), negative)) return "negative rows received";
  return {};
}

std::string check_plan_bytes(std::span<const std::byte> bytes) {
  const Result<DispatchPlan> plan = parse_plan(bytes);
  if (!plan) return refusal_problem(plan.error(), {StatusCode::kCorruptData});
  const std::vector<std::byte> again = serialize_plan(*plan);
  if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end()))
    return "an accepted plan gives other bytes";
  const Status fits =
      check_plan(*plan, plan->group_id, plan->rank, plan->num_ranks, plan->placement_epoch);
  if (!fits.ok()) return fits.to_string();
  for (const int64_t round : {int64_t{0}, plan->num_rounds / 2, plan->num_rounds - 1}) {
    std::string problem = check_round(*plan, round);
    if (!problem.empty()) return problem;
  }
  return {};
}

std::string check(std::string_view input) {
  const auto bytes = std::as_bytes(std::span(input));
  return within(kBound, input.size(), [&] { return check_plan_bytes(bytes); });
}

void set_hash(std::string* bytes) {
  if (bytes->size() < kHashBytes) return;
  const uint64_t hash = XXH3_64bits(bytes->data(), bytes->size() - kHashBytes);
  std::memcpy(bytes->data() + bytes->size() - kHashBytes, &hash, kHashBytes);
}

// Writes a boundary or a neighbour over a number at a step of 4 bytes, where all fields lie.
void edit_number(std::string* bytes, Random& random) {
  if (bytes->size() < 16) return;
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kEdges[] = {0, 1, -1, 2, 4, int64_t{1} << 31, int64_t{1} << 62, kMax, kMax - 1};
  const size_t width = random.one_in(2) ? 4 : 8;
  const size_t at = random.below((bytes->size() - 8) / 4) * 4;
  uint64_t value = 0;  // of any width: a little-endian number begins with its low bytes
  std::memcpy(&value, bytes->data() + at, width);
  value = random.one_in(2) ? static_cast<uint64_t>(kEdges[random.below(std::size(kEdges))])
                           : value + random.below(5) - 2;
  std::memcpy(bytes->data() + at, &value, width);
}

// A plan of a drawn routing: a fresh start in the middle of what is valid.
std::string drawn_plan(uint64_t seed) {
  Random random(seed);
  const int num_ranks = static_cast<int>(random.below(4)) + 1;
  const auto num_experts = static_cast<int64_t>(random.below(6)) + 1;
  const int64_t top_k = 1 + static_cast<int64_t>(random.below(static_cast<size_t>(num_experts)));
  const auto cases = routing_cases(num_ranks, num_experts, top_k, seed);
  const RoutingCase& one = cases[random.below(cases.size())];
  PlanOptions options;
  options.rank = static_cast<int>(random.below(static_cast<size_t>(num_ranks)));
  options.group_id = random.next();
  options.group_alignment = int64_t{1} << random.below(4);
  options.round_rows = options.group_alignment * static_cast<int64_t>(random.below(9) + 1);
  DispatchPlan plan;
  const Status made = make_plan(one.routings[static_cast<size_t>(options.rank)], counts_of(one),
                                {num_experts, num_ranks, seed}, options, &plan);
  if (!made.ok()) return {};
  const std::vector<std::byte> bytes = serialize_plan(plan);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string mutate(std::string_view input, Random& random, ByteMutator bytes) {
  if (random.one_in(256)) return drawn_plan(random.next());
  std::string changed(input);
  const size_t edits = random.below(3) + 1;
  for (size_t i = 0; i < edits; ++i) {
    if (random.one_in(4)) {
      bytes(&changed, random);
    } else {
      edit_number(&changed, random);
    }
  }
  if (!random.one_in(32)) set_hash(&changed);
  return changed;
}

// A plan whose only lie is written by `change`.
template <typename Change>
std::string changed_plan(const Change& change) {
  const std::string bytes = drawn_plan(3);
  Result<DispatchPlan> plan = parse_plan(std::as_bytes(std::span(bytes)));
  if (!plan) return {};
  change(&*plan);
  const std::vector<std::byte> again = serialize_plan(*plan);
  return {reinterpret_cast<const char*>(again.data()), again.size()};
}

std::map<std::string, std::string> seeds() {
  std::map<std::string, std::string> files;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    files.emplace(fmt::format("drawn_{}", seed), drawn_plan(seed));
  }
  files.emplace("nothing", "");
  files.emplace("magic_only", files.at("drawn_1").substr(0, 16));
  files.emplace("many_ranks", changed_plan([](DispatchPlan* plan) { plan->num_ranks = 1 << 30; }));
  files.emplace("many_tokens",
                changed_plan([](DispatchPlan* plan) { plan->num_tokens = int64_t{1} << 62; }));
  return files;
}

std::map<std::string, std::string> large() {
  constexpr int64_t kExperts = 64;
  std::mt19937_64 random(5);
  RoutingCase one{"large", 1, kExperts, 8, {}};
  one.routings.push_back(
      draw_routing(random, 5000, kExperts, one.top_k, 0.1, [](int64_t) { return int64_t{-1}; }));
  DispatchPlan plan;
  const Status made =
      make_plan(one.routings[0], counts_of(one), {kExperts, 1, 0}, {.round_rows = 1 << 16}, &plan);
  if (!made.ok()) return {{made.to_string(), ""}};
  const std::vector<std::byte> bytes = serialize_plan(plan);
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return {{"one_rank", text},
          {"cut", text.substr(0, text.size() / 2)},
          {"zeros", std::string(text.size(), '\0')}};
}

}  // namespace

const FuzzTarget& plan_target() {
  static const FuzzTarget target = {"plan", check, mutate, seeds, large};
  return target;
}

}  // namespace argosy::testing
