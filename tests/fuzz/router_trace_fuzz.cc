// parse_router_trace: a file of either format. What is accepted gives itself again in both formats.
//
// The mutator keeps the CRCs of an archive right, so that the arrays are checked and not the CRC
// alone. Guards src/io/npz.cc, npy.cc and router_trace*.cc.
#include <fmt/format.h>
#include <zlib.h>

#include <cstring>

#include "argosy/router_trace.h"
#include "fuzz/fuzz_target.h"
#include "fuzz/large_json.h"

namespace argosy::testing {
namespace {

constexpr size_t kMaxArrayBytes = size_t{1} << 16;  // what a deflated array may grow to
// 40 bytes of TraceRecord for one of the file, in a vector that doubles; a tree of one line; and
// both formats again.
constexpr HeapBound kBound = {.largest = 160, .peak = 512, .constant = size_t{1} << 23};

bool same(const RouterTrace& a, const RouterTrace& b) {
  const auto bytes_equal = [](const auto& x, const auto& y) {
    return x.size() == y.size() &&
           (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof x[0]) == 0);
  };
  return a.num_experts == b.num_experts && a.top_k == b.top_k &&
         bytes_equal(a.records, b.records) && bytes_equal(a.topk_idx, b.topk_idx) &&
         bytes_equal(a.topk_weights, b.topk_weights);
}

std::string check_again(const RouterTrace& trace) {
  for (const auto& bytes : {to_npz(trace), to_jsonl(trace)}) {
    if (!bytes) return "an accepted trace cannot be written: " + bytes.error().to_string();
    const auto again = parse_router_trace(*bytes);
    if (!again) return "a written trace cannot be read: " + again.error().to_string();
    // A text without lines says nothing of the sizes.
    if (!bytes->empty() && !same(*again, trace)) return "a written trace reads as another";
  }
  return {};
}

std::string check(std::string_view input) {
  return within(kBound, input.size(), [&]() -> std::string {
    TraceLimits limits;
    limits.max_array_bytes = kMaxArrayBytes;
    const Result<RouterTrace> trace = parse_router_trace(input, limits);
    if (!trace) {
      return refusal_problem(trace.error(), {StatusCode::kCorruptData, StatusCode::kInvalidArgument,
                                             StatusCode::kUnsupported, StatusCode::kNotFound});
    }
    std::string problem = check_again(*trace);
    if (!problem.empty()) return problem;
    const auto layers = replay_router_trace(*trace, trace->num_experts > 4096 ? 0 : 4096, 3);
    return layers ? std::string()
                  : refusal_problem(layers.error(),
                                    {StatusCode::kInvalidArgument, StatusCode::kUnsupported});
  });
}

template <typename T>
T number_at(const std::string& bytes, size_t at) {
  T value{};
  if (at + sizeof value <= bytes.size()) std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// Sets the CRC of every stored member whose place can be found.
void set_crcs(std::string* bytes) {
  for (size_t at = bytes->find("PK\x01\x02"); at != std::string::npos;
       at = bytes->find("PK\x01\x02", at + 4)) {
    const size_t local = number_at<uint32_t>(*bytes, at + 42);
    const size_t begin = local + 30 + number_at<uint16_t>(*bytes, local + 26) +
                         number_at<uint16_t>(*bytes, local + 28);
    const size_t size = number_at<uint32_t>(*bytes, at + 20);
    if (begin > bytes->size() || size > bytes->size() - begin || at + 20 > bytes->size()) continue;
    const auto crc = static_cast<uint32_t>(
        ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes->data() + begin), size));
    std::memcpy(bytes->data() + at + 16, &crc, sizeof crc);
  }
}

std::string mutate(std::string_view input, Random& random, ByteMutator bytes) {
  std::string changed(input);
  const size_t edits = random.below(3) + 1;
  for (size_t i = 0; i < edits; ++i) bytes(&changed, random);
  if (changed.starts_with("PK") && !random.one_in(8)) set_crcs(&changed);
  return changed;
}

RouterTrace drawn_trace(uint64_t seed, bool has_weights) {
  Random random(seed);
  RouterTrace trace;
  trace.num_experts = 8;
  trace.top_k = 2;
  for (int64_t i = 0; i < 3; ++i) {
    const auto tokens = static_cast<int64_t>(random.below(4));
    trace.records.push_back(
        {i / 2, i % 2, 0, static_cast<int64_t>(trace.topk_idx.size()) / 2, tokens});
    for (int64_t t = 0; t < tokens; ++t) {
      const auto first = static_cast<int32_t>(random.below(8));
      trace.topk_idx.insert(trace.topk_idx.end(), {first, random.one_in(3) ? -1 : (first + 1) % 8});
      if (has_weights) trace.topk_weights.insert(trace.topk_weights.end(), {0.75f, 0.25f});
    }
  }
  return trace;
}

std::map<std::string, std::string> seeds() {
  std::map<std::string, std::string> files;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const RouterTrace trace = drawn_trace(seed, seed != 2);
    files.emplace(fmt::format("drawn_{}.npz", seed), *to_npz(trace));
    files.emplace(fmt::format("drawn_{}.jsonl", seed), *to_jsonl(trace));
  }
  files.emplace("nothing", "");
  files.emplace("no_records.npz", *to_npz(RouterTrace()));
  files.emplace("huge_ids.jsonl", R"({"step":0,"layer":0,"topk_idx":[[2147483646,-1],[-1,-1]]})");
  files.emplace("control_in_key.jsonl", "{\"a\\u001b[2J\":0}");
  return files;
}

}  // namespace

const FuzzTarget& router_trace_target() {
  static const FuzzTarget target = {"router_trace", check, mutate, seeds, large_json};
  return target;
}

}  // namespace argosy::testing
