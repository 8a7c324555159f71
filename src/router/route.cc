// route(): checks, then one pass over blocks of tokens, each token alone: score, select, weigh.
// Tokens write disjoint rows and share nothing, so the bits do not depend on the threads. Where the
// CPU and the spec allow it the fused pass (fused.h) routes; what that leaves goes through exact_row.h, which
// computes all scores. The naive twin is kReferencePath. All give the same bits. Test: tests/router/route_test.cc, fused_test.cc.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

#include "argosy/router.h"
#include "base/error.h"
#include "platform/float_env.h"
#include "router/exact_row.h"
#include "router/fused.h"
#include "router/kernel.h"

namespace argosy {
namespace {

using base::invalid;
constexpr int64_t kMostTokensPerTask = 128, kLeastTokensPerTask = 32;

// Weights divided by their sum. A softmax over the chosen logits is so by itself; normalise_single
// speaks of scores that are no distribution (contract 1.7).
bool weights_sum_to_one(const RouterSpec& spec) {
  if (spec.score_function == ScoreFunction::kSoftmaxTopK) return true;
  if (spec.normalise != Choice::kYes) return false;
  return spec.top_k > 1 || spec.score_function == ScoreFunction::kSoftmax ||
         spec.normalise_single == Choice::kYes;
}

bool is_finite_row(const float* row, int64_t count) {
  if (const router::FusedKernel* kernel = router::fused_kernel(); kernel != nullptr) {
    return kernel->is_finite(row, count);
  }
  constexpr uint32_t kExponent = 0x7F800000u;
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found |= static_cast<uint32_t>((std::bit_cast<uint32_t>(row[i]) & kExponent) == kExponent);
  }
  return found == 0;
}

// Calls body(first, last, thread) for blocks of tokens that cover [0, num_tokens).
template <typename Body>
void for_token_blocks(ThreadPool* pool, int64_t num_tokens, Body&& body) {
  const int64_t num_threads = pool == nullptr ? 1 : pool->num_threads();
  // Some tasks for every thread, so that none waits long for the last.
  const int64_t per_task =
      num_threads == 1
          ? kMostTokensPerTask
          : std::clamp(num_tokens / (4 * num_threads) / kLeastTokensPerTask * kLeastTokensPerTask,
                       kLeastTokensPerTask, kMostTokensPerTask);
  const int64_t num_tasks = (num_tokens + per_task - 1) / per_task;
  const auto task_body = [&](int64_t task, int thread) {
    const int64_t first = task * per_task;
    body(first, std::min(first + per_task, num_tokens), thread);
  };
  if (pool != nullptr) {
    pool->parallel_for(num_tasks, task_body);
  } else {
    for (int64_t task = 0; task < num_tasks; ++task) task_body(task, 0);
  }
}

class Router {
 public:
  Router(const router::RoutePath& path, const RouterSpec& spec, const RouterInput& input,
         ThreadPool* pool, Routing* routing)
      : path_(path),
        spec_(spec),
        input_(input),
        pool_(pool),
        routing_(routing),
        logits_(input.logits.data),
        row_bytes_(input.logits.stride(0) * size_of(DType::kF32)),
        bias_(spec.selection_bias == Choice::kYes ? input.selection_bias.as<float>() : nullptr),
        normalised_(weights_sum_to_one(spec)),
        exact_(path, spec, bias_, normalised_) {}

  Status run() {
    ARGOSY_RETURN_IF_ERROR(prepare());
    if (path_.fused != nullptr) prepare_fused();
    std::atomic<bool> out_of_memory{false};
    for_token_blocks(pool_, num_tokens(), [&](int64_t first, int64_t last, int thread) {
      if (!route_block(first, last, tally(thread)))
        out_of_memory.store(true, std::memory_order_relaxed);
    });
    // Relaxed above: parallel_for makes what its tasks wrote visible when it returns.
    if (out_of_memory.load(std::memory_order_relaxed)) {
      return base::error(StatusCode::kOutOfMemory, "no {} bytes of scratch to route with",
                         scratch_bytes());
    }
    const int64_t bad = first_bad_.load(std::memory_order_relaxed);
    if (bad != kNone) return nonfinite_error(bad);
    sum_tallies();
    return {};
  }

 private:
  int64_t num_tokens() const { return input_.logits.dim(0); }
  bool is_masked(int64_t token) const { return input_.mask != nullptr && input_.mask[token] == 0; }
  const float* logits_row(int64_t token) const {
    return reinterpret_cast<const float*>(logits_ + token * row_bytes_);
  }

  Status nonfinite_error(int64_t token) const {
    int64_t expert = 0;
    while (is_finite_row(logits_row(token) + expert, 1)) ++expert;
    return base::error(StatusCode::kNonFinite, "logits[{}, {}] is {} (token {} of {}, expert {})",
                       token, expert, logits_row(token)[expert], token, num_tokens(), expert);
  }

  Status prepare() {
    const auto num_weights = static_cast<size_t>(num_tokens()) * static_cast<size_t>(spec_.top_k);
    try {
      routing_->topk_idx.resize(num_weights);
      routing_->topk_weights.values.resize(num_weights);
      routing_->counts.resize(static_cast<size_t>(spec_.num_experts));
    } catch (const std::exception&) {  // bad_alloc or length_error
      return base::error(StatusCode::kOutOfMemory,
                         "no memory for the routing of {} tokens x top_k {}", num_tokens(),
                         spec_.top_k);
    }
    const auto tally_bytes = num_threads() * tally_size() * static_cast<int64_t>(sizeof(int64_t));
    thread_local AlignedBuffer buffer;  // as in route_block
    ARGOSY_RETURN_IF_ERROR(buffer.reserve(tally_bytes));
    std::memset(buffer.data(), 0, static_cast<size_t>(tally_bytes));
    tallies_ = reinterpret_cast<int64_t*>(buffer.data());
    routing_->num_tokens = num_tokens();
    routing_->num_experts = spec_.num_experts;
    routing_->top_k = spec_.top_k;
    routing_->topk_weights.normalised = normalised_;
    routing_->topk_weights.scaled = true;
    routing_->topk_weights.applied = false;
    return {};
  }

  // One after the other in the same bytes: a block by the fused pass, then the tokens that it left.
  struct Scratch {
    float* fused;
    router::ExactRow::Scratch exact;
  };

  int64_t scratch_bytes() const {
    constexpr auto kFusedBytes = router::kFusedScratchFloats * static_cast<int64_t>(sizeof(float));
    return std::max(exact_.scratch_bytes(), fused_ == nullptr ? 0 : kFusedBytes);
  }

  // logits: null: all 0.
  void route_exactly(int64_t token, const float* logits, const Scratch& scratch) const {
    exact_.route(logits, scratch.exact, routing_->topk_idx.data() + token * spec_.top_k,
                 routing_->topk_weights.values.data() + token * spec_.top_k);
  }

  // Without memory for the bias exact_ does all.
  void prepare_fused() {
    thread_local AlignedBuffer buffer;  // as in route_block
    const int64_t size = router::shifted_bias_size(spec_.num_experts);
    if (spec_.num_experts > router::kFusedMostExperts ||
        !buffer.reserve(size * static_cast<int64_t>(sizeof(float))).ok()) {
      return;
    }
    auto* const shifted_bias = reinterpret_cast<float*>(buffer.data());
    if (router::make_fused_plan(spec_, bias_, normalised_, shifted_bias, &fused_plan_)) {
      fused_ = path_.fused;
    }
  }

  // Routes `count` valid tokens; those that the fused pass leaves one by one.
  // False where a row makes the whole call fail.
  bool route_tokens(const int64_t* tokens, int64_t count, const Scratch& scratch,
                    int64_t* tally) const {
    uint32_t left = (1u << count) - 1;
    if (fused_ != nullptr && count > 0) {
      router::FusedBlock block;
      block.num_tokens = count;
      block.topk_idx = routing_->topk_idx.data();
      block.weights = routing_->topk_weights.values.data();
      block.scratch = scratch.fused;
      for (int64_t i = 0; i < router::kFusedTokens; ++i) {
        block.tokens[i] = tokens[i < count ? i : 0];
        block.rows[i] = logits_row(block.tokens[i]);
      }
      left = fused_->route(fused_plan_, block);
    }
    for (; left != 0; left &= left - 1) {
      if (!route_left_token(tokens[std::countr_zero(left)], scratch, tally)) return false;
    }
    return true;
  }

  // Of routed tokens. Some blocks after they were written: their stores, masked, would be waited for. kTopK: the spec's,
  // or 0 for any.
  template <int kTopK>
  void count_tokens(int64_t first, int64_t last, int64_t* tally) const {
    const int64_t top_k = kTopK > 0 ? kTopK : spec_.top_k;
    const int32_t* ids = routing_->topk_idx.data() + first * top_k;
    int64_t num_valid = 0;
    for (int64_t token = first; token < last; ++token, ids += top_k) {
      if (is_masked(token)) continue;
      ++num_valid;
      for (int64_t k = 0; k < top_k; ++k) ++tally[ids[k]];
    }
    tally[spec_.num_experts] += num_valid;
  }

  // False for a row that makes the whole call fail.
  bool route_left_token(int64_t token, const Scratch& scratch, int64_t* tally) const {
    if (is_finite_row(logits_row(token), spec_.num_experts)) {
      route_exactly(token, logits_row(token), scratch);
    } else if (spec_.on_nonfinite == OnNonfinite::kUniform) {
      ++tally[spec_.num_experts + 1];
      route_exactly(token, nullptr, scratch);
    } else {
      int64_t seen = first_bad_.load(std::memory_order_relaxed);
      while (token < seen &&
             !first_bad_.compare_exchange_weak(seen, token, std::memory_order_relaxed)) {
      }
      return false;
    }
    return true;
  }

  // False when the thread's scratch cannot grow. Never inlined: arithmetic may not move across the
  // change of the floating-point environment.
  [[gnu::noinline]] bool route_block(int64_t first, int64_t last, int64_t* tally) const {
    thread_local AlignedBuffer buffer;  // kept, so that a steady state does not allocate
    if (!buffer.reserve(scratch_bytes()).ok()) return false;
    const Scratch scratch{reinterpret_cast<float*>(buffer.data()),
                          exact_.scratch_at(buffer.data())};
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    int64_t tokens[router::kFusedTokens];
    int64_t count = 0;
    bool is_routed = true;
    for (int64_t token = first; token < last; ++token) {
      if (is_masked(token)) {
        skip_token(token);
        continue;
      }
      tokens[count++] = token;
      if (count == router::kFusedTokens) {
        is_routed &= route_tokens(tokens, count, scratch, tally);
        count = 0;
      }
    }
    is_routed &= route_tokens(tokens, count, scratch, tally);
    if (is_routed) {
      spec_.top_k == 8 ? count_tokens<8>(first, last, tally) : count_tokens<0>(first, last, tally);
    }
    return true;
  }

  void skip_token(int64_t token) const {
    const int64_t at = token * spec_.top_k;
    std::fill_n(routing_->topk_idx.data() + at, spec_.top_k, -1);
    std::fill_n(routing_->topk_weights.values.data() + at, spec_.top_k, 0.0f);
  }

  // What a thread counts: tokens per expert [E], valid tokens, replaced rows. A line apart from the next
  // thread's.
  int64_t num_threads() const { return pool_ == nullptr ? 1 : pool_->num_threads(); }
  int64_t tally_size() const { return (spec_.num_experts + 2 + 15) / 8 * 8; }
  int64_t* tally(int64_t thread) const { return tallies_ + thread * tally_size(); }

  void sum_tallies() const {
    std::vector<int64_t>& counts = routing_->counts;
    std::fill(counts.begin(), counts.end(), 0);
    routing_->num_valid_tokens = 0;
    routing_->num_nonfinite_rows = 0;
    for (int64_t thread = 0; thread < num_threads(); ++thread) {
      const int64_t* const own = tally(thread);
      for (size_t i = 0; i < counts.size(); ++i) counts[i] += own[i];
      routing_->num_valid_tokens += own[spec_.num_experts];
      routing_->num_nonfinite_rows += own[spec_.num_experts + 1];
    }
  }

  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  const router::RoutePath path_;
  const RouterSpec& spec_;
  const RouterInput& input_;
  ThreadPool* pool_;
  Routing* routing_;
  const std::byte* const logits_;
  const int64_t row_bytes_;
  mutable std::atomic<int64_t> first_bad_{kNone};  // with OnNonfinite::kError
  int64_t* tallies_ = nullptr;                     // [num_threads][tally_size]
  const float* bias_;
  bool normalised_;
  const router::ExactRow exact_;
  const router::FusedKernel* fused_ = nullptr;  // null: exact_ does all
  router::FusedPlan fused_plan_;
};

Status check_logits(const RouterSpec& spec, const ConstTensorView& logits) {
  const bool fits = logits.dtype == DType::kF32 && logits.num_dims == 2 && logits.dim(0) >= 0 &&
                    logits.dim(1) == spec.num_experts;
  if (!fits) {
    return invalid("logits are {}, expected F32 [tokens, {}]", describe(logits), spec.num_experts);
  }
  if (logits.dim(1) > 1 && logits.stride(1) != 1) {
    return invalid("logits are {}, expected stride 1 over experts", describe(logits));
  }
  if (logits.dim(0) > 0 && logits.data == nullptr) {
    return invalid("logits {} have no data", describe(logits));
  }
  return {};
}

Status check_bias(const RouterSpec& spec, const ConstTensorView& bias) {
  if (spec.selection_bias == Choice::kNo) {
    if (bias.dtype == DType::kUnset) return {};
    return invalid("selection_bias {} given, but the spec has none", describe(bias));
  }
  if (bias.dtype != DType::kF32 || bias.num_dims != 1 || bias.dim(0) != spec.num_experts ||
      !bias.is_dense() || bias.data == nullptr) {
    return invalid("selection_bias is {}, expected dense F32 [{}]", describe(bias),
                   spec.num_experts);
  }
  const float* values = bias.as<float>();
  for (int64_t i = 0; i < spec.num_experts; ++i) {
    if (!std::isfinite(values[i]))
      return invalid("selection_bias of expert {} is {}", i, values[i]);
  }
  return {};
}

}  // namespace

Status router::route_by(const RoutePath& path, const RouterSpec& spec, const RouterInput& input,
                        ThreadPool* pool, Routing* routing) {
  ARGOSY_RETURN_IF_ERROR(validate(spec));
  if (routing == nullptr) return invalid("routing is null");
  ARGOSY_RETURN_IF_ERROR(check_logits(spec, input.logits));
  ARGOSY_RETURN_IF_ERROR(check_bias(spec, input.selection_bias));
  // With kError a bad row may turn up when others are done, and then *routing must be as it was. Kept, so
  // that a steady state does not allocate.
  thread_local Routing spare;
  if (spec.on_nonfinite == OnNonfinite::kUniform) {
    return Router(path, spec, input, pool, routing).run();
  }
  ARGOSY_RETURN_IF_ERROR(Router(path, spec, input, pool, &spare).run());
  std::swap(*routing, spare);
  return {};
}

Status route(const RouterSpec& spec, const RouterInput& input, ThreadPool* pool, Routing* routing) {
  return router::route_by({&router::kernel(), true, router::fused_kernel()}, spec, input, pool,
                          routing);
}

}  // namespace argosy
