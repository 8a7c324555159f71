// See argosy/gradient_sync.h. What one rank finds wrong travels down its column, then along the rows, so that the whole
// grid gives up together and before a sum is changed. Test: tests/moe/gradient_sync_test.cc.
#include "argosy/gradient_sync.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "moe/gradient_norm.h"
#include "platform/float_env.h"
#include "transport/rank_sum.h"
#include "transport/status_message.h"

namespace argosy {

using transport::AllGather;
using transport::StatusMessage;

namespace {

platform::Deadline deadline_of(const Group& group) {
  return platform::Deadline::after(group.step_deadline());
}

// Every rank's status and number: the first error, or the sum of the numbers.
Result<int64_t> gather_statuses(Group& group, AllGather& gather, const char* what,
                                const Status& local, int64_t value) {
  const StatusMessage mine = transport::to_message(local, value);
  ARGOSY_RETURN_IF_ERROR(gather.issue(std::as_bytes(std::span(&mine, 1))));
  ARGOSY_RETURN_IF_ERROR(gather.wait(deadline_of(group), "statuses of gradients"));
  int64_t sum = 0;
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    ARGOSY_RETURN_IF_ERROR(transport::status_of(gather.from(rank), what, rank));
    if (__builtin_add_overflow(sum, transport::value_of(gather.from(rank)), &sum)) {
      return base::invalid("the tokens of {} {} and those before it are more than int64 holds",
                           what, rank);
    }
  }
  return sum;
}

// What all ranks of a column (the copies of the same experts), or of a row, must share.
std::vector<Setting> settings_of(const MoeGradients& gradients, const GradientSyncOptions& options,
                                 bool of_copies) {
  const std::string prefix = of_copies ? "copies: " : "";
  std::vector<Setting> settings;
  for (const WeightGradient& gradient : weight_gradients(gradients)) {
    TensorView view = gradient.view;
    // Ranks of a row may hold different numbers of experts.
    if (gradient.is_given() && gradient.is_expert && !of_copies) view.shape[0] = 0;
    settings.push_back(
        {prefix + gradient.name, gradient.is_given() ? describe(view) : std::string("none")});
  }
  settings.push_back({prefix + "global_tokens", fmt::format("{}", options.global_tokens)});
  settings.push_back({prefix + "max_norm", fmt::format("{}", options.max_norm)});
  settings.push_back(
      {prefix + "nonfinite", options.nonfinite == NonFiniteGradients::kError ? "error" : "pass"});
  return settings;
}

Status check_input(const MoeGradients& gradients, int64_t num_tokens,
                   const GradientSyncOptions& options) {
  if (num_tokens < 0 || options.global_tokens < 0) {
    return base::invalid("gradients of {} tokens, {} in the global batch", num_tokens,
                         options.global_tokens);
  }
  if (!(options.max_norm >= 0)) return base::invalid("max_norm is {}", options.max_norm);
  return check_weight_gradients(gradients);
}

// change(values, count) over all weight gradients, block by block on the pool.
template <typename Change>
void for_each_block(ThreadPool& pool, const MoeGradients& gradients, const Change& change) {
  constexpr int64_t kBlock = 16384;
  for (const WeightGradient& gradient : weight_gradients(gradients)) {
    if (!gradient.is_given()) continue;
    const int64_t count = gradient.view.num_elements();
    auto* const values = gradient.view.as<float>();
    pool.parallel_for((count + kBlock - 1) / kBlock, [&](int64_t block, int) {
      const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
      const int64_t begin = block * kBlock;
      change(values + begin, std::min(kBlock, count - begin));
    });
  }
}

}  // namespace

struct GradientSync::State {
  Group& ep;
  Group* copies;  // null: every expert once
  std::unique_ptr<AllGather> ep_statuses, copies_statuses;
  std::unique_ptr<RowGather> rows;
  std::unique_ptr<transport::RankSum> sum;

  // The tokens of the global batch, once the whole grid has found its input right.
  Result<int64_t> agree(const MoeGradients& gradients, int64_t num_tokens,
                        const GradientSyncOptions& options) const {
    Status verdict = check_input(gradients, num_tokens, options);
    int64_t tokens = num_tokens;
    if (copies != nullptr) {
      const Result<int64_t> sum_of_copies =
          gather_statuses(*copies, *copies_statuses, "copy", verdict, num_tokens);
      verdict = sum_of_copies.error();
      if (verdict.ok()) verdict = copies->agree(settings_of(gradients, options, true));
      if (verdict.ok()) tokens = *sum_of_copies;
    }
    ARGOSY_ASSIGN_OR_RETURN(const int64_t all,
                            gather_statuses(ep, *ep_statuses, "rank", verdict, tokens));
    ARGOSY_RETURN_IF_ERROR(ep.agree(settings_of(gradients, options, false)));
    if (options.global_tokens > 0) return options.global_tokens;
    if (all == 0) return base::invalid("the global batch has no valid token: no mean of gradients");
    return all;
  }

  Status make_mean(const MoeGradients& gradients, int64_t num_tokens) const {
    if (copies != nullptr) {
      for (const WeightGradient& gradient : weight_gradients(gradients)) {
        if (!gradient.is_given()) continue;
        ARGOSY_RETURN_IF_ERROR(sum->run(
            std::span(gradient.view.as<float>(), static_cast<size_t>(gradient.view.num_elements())),
            copies->step_deadline()));
      }
    }
    const auto divisor = static_cast<double>(num_tokens);
    for_each_block(ep.pool(), gradients, [&](float* values, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        values[i] = static_cast<float>(static_cast<double>(values[i]) / divisor);
      }
    });
    return {};
  }

  Result<GradientSummary> finish(const MoeGradients& gradients, int64_t num_tokens,
                                 const GradientSyncOptions& options, Status* nonfinite) const {
    ARGOSY_RETURN_IF_ERROR(make_mean(gradients, num_tokens));
    ARGOSY_ASSIGN_OR_RETURN(const SquareSums squares,
                            sum_squares(*rows, ep.rank(), ep.num_ranks(), ep.pool(), gradients));
    GradientSummary summary;
    summary.num_tokens = num_tokens;
    summary.norm = std::sqrt(squares.sum);
    // All ranks of all rows see the same sum.
    if (!std::isfinite(squares.sum) && options.nonfinite == NonFiniteGradients::kError) {
      const std::string where = find_nonfinite(gradients, squares.first_expert);
      const Status mine = where.empty() ? Status() : Status(StatusCode::kNonFinite, where);
      *nonfinite = gather_statuses(ep, *ep_statuses, "rank", mine, 0).error();
    } else if (options.max_norm > 0 && std::isfinite(summary.norm) &&
               summary.norm > options.max_norm) {
      summary.clip_scale = static_cast<float>(options.max_norm / summary.norm);
      for_each_block(ep.pool(), gradients, [&](float* values, int64_t count) {
        for (int64_t i = 0; i < count; ++i) values[i] *= summary.clip_scale;
      });
    }
    return summary;
  }
};

GradientSync::GradientSync(std::unique_ptr<State> state) : state_(std::move(state)) {}
GradientSync::~GradientSync() = default;

Result<std::unique_ptr<GradientSync>> GradientSync::create(Group& ep, Group* copies) {
  if (copies != nullptr && copies->num_ranks() == 1) copies = nullptr;
  Status column;
  if (copies != nullptr) {
    column = copies->agree({{"ep.num_ranks", fmt::format("{}", ep.num_ranks())},
                            {"ep.rank", fmt::format("{}", ep.rank())}});
  }
  // Also a rank whose column is wrong takes part, so that its row learns it at once.
  std::vector<Setting> settings;
  if (column.ok()) {
    settings.push_back(
        {"copies.num_ranks", fmt::format("{}", copies == nullptr ? 1 : copies->num_ranks())});
    settings.push_back({"copies.rank", fmt::format("{}", copies == nullptr ? 0 : copies->rank())});
  } else {
    settings.push_back({"gradient_sync.check", column.to_string()});
  }
  const Status row = ep.agree(settings);
  ARGOSY_RETURN_IF_ERROR(column);
  ARGOSY_RETURN_IF_ERROR(row);
  auto state = std::make_unique<State>(State{ep, copies, {}, {}, {}, {}});
  ARGOSY_ASSIGN_OR_RETURN(state->ep_statuses,
                          AllGather::create(ep.endpoint(), sizeof(StatusMessage), deadline_of(ep)));
  ARGOSY_ASSIGN_OR_RETURN(state->rows, RowGather::create(ep));
  if (copies != nullptr) {
    ARGOSY_ASSIGN_OR_RETURN(
        state->copies_statuses,
        AllGather::create(copies->endpoint(), sizeof(StatusMessage), deadline_of(*copies)));
    ARGOSY_ASSIGN_OR_RETURN(state->sum,
                            transport::RankSum::create(copies->endpoint(), deadline_of(*copies)));
  }
  return std::unique_ptr<GradientSync>(new GradientSync(std::move(state)));
}

Result<GradientSummary> GradientSync::run(const MoeGradients& gradients, int64_t num_tokens,
                                          const GradientSyncOptions& options) {
  const State& state = *state_;
  ARGOSY_ASSIGN_OR_RETURN(const int64_t tokens, state.agree(gradients, num_tokens, options));
  Status nonfinite;
  Result<GradientSummary> summary = state.finish(gradients, tokens, options, &nonfinite);
  if (!summary.has_value()) {
    // Past the agreement a failure is this rank's alone: nobody waits for it.
    state.ep.abort(summary.error());
    if (state.copies != nullptr) state.copies->abort(summary.error());
  }
  ARGOSY_RETURN_IF_ERROR(nonfinite);
  return summary;
}

}  // namespace argosy
