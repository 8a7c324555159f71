// Losses that keep a router balanced during training: the auxiliary loss and the z-loss, forward
// and gradient in the logits (contract 2.1, 2.2). Formulas and what other systems do:
// docs/routing.md.
//
// Nothing here communicates. A loss over many ranks (or micro-batches) takes three steps: sums of
// one's own tokens; the caller adds the sums of all; loss and gradient from the totals. Counts are
// int64 and exact, and gradients depend on counts and the row alone: any split of the tokens over
// ranks, parallel axes and threads gives the same bits of every gradient, and the same loss to
// 1e-12.
//
// The scope of the auxiliary loss is what was added up:
//   micro-batch    the sums of one micro-batch, over all ranks
//   sequence       sums with a `sequence` index; each sequence over the ranks that hold parts of it
//   global batch   the sums of all micro-batches and ranks, before the first backward
// Only valid tokens count; uneven and empty ranks are normal. Test:
// tests/router/balance_loss_test.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "argosy/router.h"
#include "argosy/router_backward.h"
#include "argosy/status.h"
#include "argosy/thread_pool.h"

namespace argosy {

// Which choices are counted as load.
enum class LossCounts {
  kRouted,     // the routing really used, with bias and group limit, before any drop
  kPlainTopK,  // a plain top-k of the unbiased scores, no groups: Megatron, DeepSeek
};

enum class LossScale {
  kMegatron,     // coeff * E/(K T^2) * sum_i n_i sum_t score(t, i): 1 x coeff when uniform
  kHuggingFace,  // K times that, for one layer
};

struct BalanceInput {
  RouterInput rows;                  // logits and mask as routed; selection_bias is not looked at
  const Routing* routing = nullptr;  // before any drop; not needed for kPlainTopK
  LossCounts counts_from = LossCounts::kRouted;
  // [T] which sequence a token belongs to, in [0, num_sequences), in any order; null: all to 0.
  const int32_t* sequence = nullptr;
  int64_t num_sequences = 1;
};

// What tokens add up to, for each of S sequences (1 for the other scopes).
struct BalanceSums {
  int64_t num_sequences = 0;
  int64_t num_experts = 0;
  std::vector<int64_t> counts;      // [S, E] choices of expert e
  std::vector<int64_t> num_tokens;  // [S] valid tokens
  // [S, E] sum of the scores, which sum to 1 for every token: softmax over E for both softmax
  // functions; else the scores divided by their sum over E, exact at any magnitude (contract 1.7).
  std::vector<double> score_sums;
};

// Sums of these tokens, in token order. A row that OnNonfinite::kUniform replaced counts as one
// of logits 0.
// Errors: those of validate(); kInvalidArgument for shapes, for a routing that is no choice of K
// experts for every valid token, for a sequence out of range; kNonFinite; kOutOfMemory. Allocates
// some MiB, or one row, of scratch.
Status balance_sums(const RouterSpec& spec, const BalanceInput& input, ThreadPool* pool,
                    BalanceSums* sums);

// *into += from, element by element: the step a caller does over ranks and micro-batches. An empty
// *into (num_sequences 0) becomes `from`. Errors: kInvalidArgument for other sizes, for a count
// that would not fit int64.
Status add_sums(const BalanceSums& from, BalanceSums* into);

struct AuxLossSpec {
  double coeff = 0.0;
  LossScale scale = LossScale::kMegatron;
  // The loss is the mean over so many sequences; 0: those of the sums with a valid token. To add up
  // over micro-batches, give the number of the global batch.
  int64_t num_sequences = 0;
};

// The loss of sums over the whole scope. It is linear in score_sums: with counts and num_tokens of
// the scope and the score_sums of one rank it is that rank's share, and the shares add up to the
// loss. A sequence without a valid token adds nothing. Errors: kInvalidArgument.
Result<double> aux_loss(const RouterSpec& spec, const AuxLossSpec& aux, const BalanceSums& sums);

// d_logits = d_loss * the gradient of aux_loss; counts are constants. Of `totals` counts and
// num_tokens are used, which must be those of the whole scope; of `input` logits, mask and
// sequence.
//
// io  d_logits  fp32 [T, E] dense; masked and replaced rows: no gradient
// Errors: as balance_sums(); d_logits is then unchanged, but for kOutOfMemory.
Status aux_loss_backward(const RouterSpec& spec, const AuxLossSpec& aux, const BalanceInput& input,
                         const BalanceSums& totals, double d_loss, GradientMode mode,
                         ThreadPool* pool, const TensorView& d_logits);

// Sum of logsumexp(logits)^2 over valid tokens, and their number.
struct ZLossSums {
  double sum = 0.0;
  int64_t num_tokens = 0;
};

// In token order. Errors: those of balance_sums() that can occur.
Result<ZLossSums> z_loss_sums(const RouterSpec& spec, const RouterInput& rows, ThreadPool* pool);

// coeff * mean of logsumexp^2; 0 without tokens. Add the sums of ranks and micro-batches first.
double z_loss(double coeff, const ZLossSums& sums);

// d_logits = d_loss * the gradient of z_loss; `num_tokens`: of the whole scope.
// Errors: as aux_loss_backward().
Status z_loss_backward(const RouterSpec& spec, double coeff, const RouterInput& rows,
                       int64_t num_tokens, double d_loss, GradientMode mode, ThreadPool* pool,
                       const TensorView& d_logits);

}  // namespace argosy
