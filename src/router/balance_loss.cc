// Auxiliary loss and z-loss. Sums over tokens are taken in token order whatever the threads: a
// round of rows is scored in parallel, then columns are added in parallel, rows in order. Test:
// tests/router/balance_loss_test.cc.
#include "argosy/balance_loss.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "base/error.h"
#include "platform/float_env.h"
#include "router/token_rows.h"

namespace argosy {
namespace {

using base::invalid;
using router::RowKind;
using router::TokenRows;

constexpr int64_t kRoundElements = int64_t{1} << 17;  // 1 MiB of doubles
constexpr int64_t kColumnsPerTask = 64;

// Scores that sum to 1, of one row (contract 2.1).
void row_shares(ScoreFunction function, const float* logits, int64_t num_experts, double* shares) {
  const double sum = router::terms_of(function)(logits, num_experts, shares);
  for (int64_t e = 0; e < num_experts; ++e) shares[e] /= sum;
}

// Logsumexp of a row; `shares` becomes its softmax.
double log_sum_exp(const float* logits, int64_t num_experts, double* shares) {
  const double sum = router::kernel().softmax_terms(logits, num_experts, shares);
  for (int64_t e = 0; e < num_experts; ++e) shares[e] /= sum;
  const double peak = static_cast<double>(*std::max_element(logits, logits + num_experts));
  return peak + router::gradient_kernel().log_of_sum(sum);
}

// What a replaced row gives: logits 0.
double uniform_log_sum_exp(int64_t num_experts) {
  return router::gradient_kernel().log_of_sum(static_cast<double>(num_experts));
}

template <typename T>
Status resize(int64_t rows, int64_t columns, std::vector<T>* values) {
  const int64_t dims[] = {rows, columns};
  ARGOSY_ASSIGN_OR_RETURN(const int64_t bytes,
                          checked_num_bytes(dims, static_cast<int64_t>(sizeof(T))));
  try {
    values->assign(static_cast<size_t>(rows * columns), T{});
  } catch (const std::exception&) {  // bad_alloc or length_error
    return base::error(StatusCode::kOutOfMemory, "no {} bytes for the sums of {} x {}", bytes, rows,
                       columns);
  }
  return {};
}

int64_t sequence_of(const BalanceInput& input, int64_t token) {
  return input.sequence == nullptr ? 0 : input.sequence[token];
}

Status check_sequences(const RouterSpec& spec, const BalanceInput& input) {
  if (input.num_sequences < 1) {
    return invalid("num_sequences is {}, expected at least 1", input.num_sequences);
  }
  if (input.sequence == nullptr) return {};
  const TokenRows rows(spec, input.rows);
  for (int64_t token = 0; token < rows.num_tokens(); ++token) {
    if (rows.is_masked(token)) continue;
    if (input.sequence[token] < 0 || input.sequence[token] >= input.num_sequences) {
      return invalid("sequence[{}] is {}, expected 0 to {}", token, input.sequence[token],
                     input.num_sequences - 1);
    }
  }
  return {};
}

class Summing {
 public:
  Summing(const RouterSpec& spec, const BalanceInput& input, BalanceSums* sums)
      : spec_(spec), input_(input), rows_(spec, input.rows), sums_(sums) {}

  void count(const Routing& routing) const {
    for (int64_t token = 0; token < rows_.num_tokens(); ++token) {
      if (rows_.is_masked(token)) continue;
      const int64_t sequence = sequence_of(input_, token);
      ++sums_->num_tokens[static_cast<size_t>(sequence)];
      int64_t* counts = sums_->counts.data() + sequence * spec_.num_experts;
      const int32_t* topk_idx = routing.topk_idx.data() + token * spec_.top_k;
      for (int64_t k = 0; k < spec_.top_k; ++k) ++counts[topk_idx[k]];
    }
  }

  Status add_scores(ThreadPool* pool) {
    const int64_t round = std::clamp<int64_t>(kRoundElements / spec_.num_experts, 1,
                                              std::max<int64_t>(rows_.num_tokens(), 1));
    ARGOSY_RETURN_IF_ERROR(resize(round, spec_.num_experts, &shares_));
    const int64_t column_tasks = (spec_.num_experts + kColumnsPerTask - 1) / kColumnsPerTask;
    for (int64_t first = 0; first < rows_.num_tokens(); first += round) {
      const int64_t count = std::min(round, rows_.num_tokens() - first);
      router::for_rows(pool, count, [&](int64_t from, int64_t to) { score_rows(first, from, to); });
      const auto add = [&](int64_t task, int) { add_columns(first, count, task); };
      if (pool != nullptr) {
        pool->parallel_for(column_tasks, add);
      } else {
        for (int64_t task = 0; task < column_tasks; ++task) add(task, 0);
      }
    }
    return {};
  }

 private:
  [[gnu::noinline]] void score_rows(int64_t base, int64_t from, int64_t to) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    const int64_t num_experts = spec_.num_experts;
    for (int64_t i = from; i < to; ++i) {
      double* shares = shares_.data() + i * num_experts;
      const RowKind kind = rows_.kind(base + i);
      if (kind == RowKind::kMasked) continue;
      if (kind == RowKind::kReplaced) {
        std::fill(shares, shares + num_experts, 1.0 / static_cast<double>(num_experts));
      } else {
        row_shares(spec_.score_function, rows_.row(base + i), num_experts, shares);
      }
    }
  }

  [[gnu::noinline]] void add_columns(int64_t base, int64_t count, int64_t task) {
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    const int64_t first = task * kColumnsPerTask;
    const int64_t last = std::min(first + kColumnsPerTask, spec_.num_experts);
    for (int64_t i = 0; i < count; ++i) {
      if (rows_.is_masked(base + i)) continue;
      const double* shares = shares_.data() + i * spec_.num_experts;
      double* sums = sums_->score_sums.data() + sequence_of(input_, base + i) * spec_.num_experts;
      for (int64_t e = first; e < last; ++e) sums[e] += shares[e];
    }
  }

  const RouterSpec& spec_;
  const BalanceInput& input_;
  TokenRows rows_;
  BalanceSums* sums_;
  std::vector<double> shares_;  // [round, E]
};

// Ok, or what is wrong with sums that come from the caller.
Status check_sums(const RouterSpec& spec, const AuxLossSpec& aux, const BalanceSums& sums) {
  const auto sequences = static_cast<size_t>(std::max<int64_t>(sums.num_sequences, 0));
  const size_t elements = sequences * static_cast<size_t>(spec.num_experts);
  if (sums.num_experts != spec.num_experts || sums.num_sequences < 1 ||
      sums.num_tokens.size() != sequences || sums.counts.size() != elements ||
      sums.score_sums.size() != elements) {
    return invalid(
        "sums of {} sequences and {} experts hold {} counts, {} token numbers and {} score sums; "
        "the spec has {} experts",
        sums.num_sequences, sums.num_experts, sums.counts.size(), sums.num_tokens.size(),
        sums.score_sums.size(), spec.num_experts);
  }
  if (!std::isfinite(aux.coeff)) return invalid("coeff is {}, expected finite", aux.coeff);
  if (aux.num_sequences < 0) return invalid("num_sequences is {}", aux.num_sequences);
  for (size_t i = 0; i < sequences; ++i) {
    if (sums.num_tokens[i] < 0) return invalid("num_tokens[{}] is {}", i, sums.num_tokens[i]);
  }
  return {};
}

// How many sequences the mean is over; 0 when none has a token.
int64_t mean_over(const AuxLossSpec& aux, const BalanceSums& sums) {
  if (aux.num_sequences > 0) return aux.num_sequences;
  return sums.num_sequences -
         std::count(sums.num_tokens.begin(), sums.num_tokens.end(), int64_t{0});
}

// coeff * E/(K T^2) of one sequence, and the mean over sequences; 0 without tokens.
double scale_of(const RouterSpec& spec, const AuxLossSpec& aux, int64_t sequences,
                int64_t num_tokens) {
  if (num_tokens == 0) return 0.0;
  const double per_choice =
      aux.scale == LossScale::kHuggingFace ? 1.0 : static_cast<double>(spec.top_k);
  const auto tokens = static_cast<double>(num_tokens);
  return aux.coeff * static_cast<double>(spec.num_experts) /
         (per_choice * tokens * tokens * static_cast<double>(sequences));
}

[[gnu::noinline]] double loss_of(const RouterSpec& spec, const AuxLossSpec& aux,
                                 const BalanceSums& sums) {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  const int64_t sequences = mean_over(aux, sums);
  double loss = 0.0;
  for (int64_t s = 0; s < sums.num_sequences; ++s) {
    double dot = 0.0;
    for (int64_t e = s * spec.num_experts; e < (s + 1) * spec.num_experts; ++e) {
      const auto at = static_cast<size_t>(e);
      dot += static_cast<double>(sums.counts[at]) * sums.score_sums[at];
    }
    loss += scale_of(spec, aux, sequences, sums.num_tokens[static_cast<size_t>(s)]) * dot;
  }
  return loss;
}

[[gnu::noinline]] void add_doubles(const std::vector<double>& more, std::vector<double>* sums) {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  for (size_t i = 0; i < more.size(); ++i) (*sums)[i] += more[i];
}

[[gnu::noinline]] ZLossSums sum_squares(const TokenRows& tokens,
                                        const std::vector<double>& squares) {
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  ZLossSums sums;
  for (int64_t token = 0; token < tokens.num_tokens(); ++token) {
    if (tokens.is_masked(token)) continue;
    ++sums.num_tokens;
    sums.sum += squares[static_cast<size_t>(token)];
  }
  return sums;
}

// Scratch of a row of a gradient: shares, per-share gradients, results, slopes.
struct RowScratch {
  double* share;
  double* grad;
  double* by_log;
  double* slope;

  static int64_t bytes(const RouterSpec& spec) {
    return spec.num_experts * static_cast<int64_t>(4 * sizeof(double));
  }
  RowScratch(const RouterSpec& spec, std::byte* base)
      : share(reinterpret_cast<double*>(base)),
        grad(share + spec.num_experts),
        by_log(grad + spec.num_experts),
        slope(by_log + spec.num_experts) {}
};

// Calls body(token, scratch, d_row) for the rows of [first, last) that have a gradient. False when
// the thread's scratch cannot grow. Never inlined: arithmetic may not move across the change of the
// floating-point environment.
template <typename Body>
[[gnu::noinline]] bool for_gradient_rows(const RouterSpec& spec, const TokenRows& rows,
                                         GradientMode mode, float* d_logits, int64_t first,
                                         int64_t last, const Body& body) {
  thread_local AlignedBuffer buffer;  // kept, so that a steady state does not allocate
  if (!buffer.reserve(RowScratch::bytes(spec)).ok()) return false;
  const RowScratch scratch(spec, buffer.data());
  const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
  for (int64_t token = first; token < last; ++token) {
    float* d_row = d_logits + token * spec.num_experts;
    if (rows.kind(token) == RowKind::kOrdinary) {
      body(token, scratch, d_row);
    } else {
      router::put_zero_row(mode, spec.num_experts, d_row);
    }
  }
  return true;
}

}  // namespace

Status balance_sums(const RouterSpec& spec, const BalanceInput& input, ThreadPool* pool,
                    BalanceSums* sums) {
  if (sums == nullptr) return invalid("sums is null");
  ARGOSY_RETURN_IF_ERROR(router::check_rows(spec, input.rows, pool));
  ARGOSY_RETURN_IF_ERROR(check_sequences(spec, input));
  Routing plain;
  const Routing* routing = input.routing;
  if (input.counts_from == LossCounts::kPlainTopK) {
    RouterSpec plain_spec = spec;
    plain_spec.selection_bias = Choice::kNo;
    plain_spec.num_groups = 1;
    plain_spec.keep_groups = 1;
    plain_spec.group_score = GroupScore::kMax;
    RouterInput plain_rows = input.rows;
    plain_rows.selection_bias = {};
    ARGOSY_RETURN_IF_ERROR(route(plain_spec, plain_rows, pool, &plain));
    routing = &plain;
  }
  if (routing == nullptr) return invalid("routing is null, but counts come from it");
  ARGOSY_RETURN_IF_ERROR(router::check_routing(spec, input.rows, *routing));
  sums->num_sequences = input.num_sequences;
  sums->num_experts = spec.num_experts;
  ARGOSY_RETURN_IF_ERROR(resize(input.num_sequences, spec.num_experts, &sums->counts));
  ARGOSY_RETURN_IF_ERROR(resize(input.num_sequences, 1, &sums->num_tokens));
  ARGOSY_RETURN_IF_ERROR(resize(input.num_sequences, spec.num_experts, &sums->score_sums));
  Summing summing(spec, input, sums);
  summing.count(*routing);
  return summing.add_scores(pool);
}

Status add_sums(const BalanceSums& from, BalanceSums* into) {
  if (into == nullptr) return invalid("into is null");
  if (into->num_sequences == 0) {
    *into = from;
    return {};
  }
  if (into->num_sequences != from.num_sequences || into->num_experts != from.num_experts ||
      into->counts.size() != from.counts.size() ||
      into->num_tokens.size() != from.num_tokens.size() ||
      into->score_sums.size() != from.score_sums.size()) {
    return invalid("sums of {} sequences and {} experts cannot be added to those of {} and {}",
                   from.num_sequences, from.num_experts, into->num_sequences, into->num_experts);
  }
  BalanceSums sum = *into;
  const auto add = [](const std::vector<int64_t>& more, std::vector<int64_t>* counts) {
    bool overflow = false;
    for (size_t i = 0; i < more.size(); ++i) {
      overflow |= __builtin_add_overflow((*counts)[i], more[i], &(*counts)[i]);
    }
    return !overflow;
  };
  if (!add(from.counts, &sum.counts) || !add(from.num_tokens, &sum.num_tokens)) {
    return invalid("a count would not fit 64 bits");
  }
  add_doubles(from.score_sums, &sum.score_sums);
  *into = std::move(sum);
  return {};
}

Result<double> aux_loss(const RouterSpec& spec, const AuxLossSpec& aux, const BalanceSums& sums) {
  ARGOSY_RETURN_IF_ERROR(validate(spec));
  ARGOSY_RETURN_IF_ERROR(check_sums(spec, aux, sums));
  return loss_of(spec, aux, sums);
}

Status aux_loss_backward(const RouterSpec& spec, const AuxLossSpec& aux, const BalanceInput& input,
                         const BalanceSums& totals, double d_loss, GradientMode mode,
                         ThreadPool* pool, const TensorView& d_logits) {
  ARGOSY_RETURN_IF_ERROR(router::check_rows(spec, input.rows, pool));
  ARGOSY_RETURN_IF_ERROR(check_sequences(spec, input));
  ARGOSY_RETURN_IF_ERROR(check_sums(spec, aux, totals));
  ARGOSY_RETURN_IF_ERROR(router::check_d_logits(input.rows.logits, d_logits));
  if (totals.num_sequences != input.num_sequences) {
    return invalid("totals of {} sequences, but the input has {}", totals.num_sequences,
                   input.num_sequences);
  }
  const TokenRows rows(spec, input.rows);
  const router::ScoreSlopes slopes = router::slopes_of(spec.score_function);
  const int64_t sequences = mean_over(aux, totals);
  const auto run_row = [&](int64_t token, const RowScratch& scratch, float* d_row) {
    const int64_t num_experts = spec.num_experts;
    const int64_t sequence = sequence_of(input, token);
    const int64_t* counts = totals.counts.data() + sequence * num_experts;
    const int64_t num_tokens = totals.num_tokens[static_cast<size_t>(sequence)];
    const double scale = scale_of(spec, aux, sequences, num_tokens) * d_loss;
    for (int64_t e = 0; e < num_experts; ++e) scratch.grad[e] = static_cast<double>(counts[e]);
    row_shares(spec.score_function, rows.row(token), num_experts, scratch.share);
    router::through_shares(scratch.share, scratch.grad, num_experts, scratch.by_log);
    if (slopes != nullptr) slopes(rows.row(token), num_experts, scratch.slope);
    for (int64_t e = 0; e < num_experts; ++e) {
      const double slope = slopes != nullptr ? scratch.slope[e] : 1.0;
      router::put_gradient(mode, scale * (scratch.by_log[e] * slope), d_row + e);
    }
  };
  return router::run_rows(
      pool, rows.num_tokens(), RowScratch::bytes(spec), [&](int64_t first, int64_t last) {
        return for_gradient_rows(spec, rows, mode, d_logits.as<float>(), first, last, run_row);
      });
}

Result<ZLossSums> z_loss_sums(const RouterSpec& spec, const RouterInput& rows, ThreadPool* pool) {
  ARGOSY_RETURN_IF_ERROR(router::check_rows(spec, rows, pool));
  const TokenRows tokens(spec, rows);
  std::vector<double> squares;
  ARGOSY_RETURN_IF_ERROR(resize(tokens.num_tokens(), 1, &squares));
  const double uniform = uniform_log_sum_exp(spec.num_experts);
  const auto run = [&](int64_t first, int64_t last) __attribute__((noinline)) {
    thread_local AlignedBuffer buffer;  // kept, so that a steady state does not allocate
    if (!buffer.reserve(RowScratch::bytes(spec)).ok()) return false;
    const RowScratch scratch(spec, buffer.data());
    const platform::ScopedFloatEnv env(platform::Denormals::kKeep);
    for (int64_t token = first; token < last; ++token) {
      const RowKind kind = tokens.kind(token);
      if (kind == RowKind::kMasked) continue;
      const double value = kind == RowKind::kReplaced
                               ? uniform
                               : log_sum_exp(tokens.row(token), spec.num_experts, scratch.share);
      squares[static_cast<size_t>(token)] = value * value;
    }
    return true;
  };
  ARGOSY_RETURN_IF_ERROR(router::run_rows(pool, tokens.num_tokens(), RowScratch::bytes(spec), run));
  return sum_squares(tokens, squares);
}

double z_loss(double coeff, const ZLossSums& sums) {
  return sums.num_tokens == 0 ? 0.0 : coeff * sums.sum / static_cast<double>(sums.num_tokens);
}

Status z_loss_backward(const RouterSpec& spec, double coeff, const RouterInput& rows,
                       int64_t num_tokens, double d_loss, GradientMode mode, ThreadPool* pool,
                       const TensorView& d_logits) {
  ARGOSY_RETURN_IF_ERROR(router::check_rows(spec, rows, pool));
  ARGOSY_RETURN_IF_ERROR(router::check_d_logits(rows.logits, d_logits));
  const TokenRows tokens(spec, rows);
  if (!std::isfinite(coeff)) return invalid("coeff is {}, expected finite", coeff);
  if (num_tokens < 0) return invalid("num_tokens is {}", num_tokens);
  const double scale =
      num_tokens == 0 ? 0.0 : coeff * d_loss * 2.0 / static_cast<double>(num_tokens);
  const auto run_row = [&](int64_t token, const RowScratch& scratch, float* d_row) {
    const double value = log_sum_exp(tokens.row(token), spec.num_experts, scratch.share);
    for (int64_t e = 0; e < spec.num_experts; ++e) {
      router::put_gradient(mode, scale * value * scratch.share[e], d_row + e);
    }
  };
  return router::run_rows(
      pool, tokens.num_tokens(), RowScratch::bytes(spec), [&](int64_t first, int64_t last) {
        return for_gradient_rows(spec, tokens, mode, d_logits.as<float>(), first, last, run_row);
      });
}

}  // namespace argosy
