// One token of the router exactly: scores, choice and weights of what the fused pass (fused.h) leaves, and of
// every token where it has no way.
//
// The scratch of a thread fits a first-level cache of 32 KiB with the most experts and the largest top_k: where a
// whole row of scores does not (above some 1400 experts), they are made a chunk at a time and kept only as the
// integers that the choice compares, and those of the chosen are made again. Callers set the floating-point
// environment. Test: tests/router/exact_row_test.cc, and all that route() has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "argosy/router.h"
#include "router/fused.h"
#include "router/kernel.h"

namespace argosy::router {

inline constexpr int64_t kMostScratchBytes = int64_t{32} * 1024;
// Experts whose exact scores exist at a time, where those of a row do not fit. Softmax then takes every power twice.
inline constexpr int64_t kScoreChunk = 512;

class ExactRow {
 public:
  // bias: [E] finite or null. Both, and the spec, outlive this. Precondition: validate(spec).ok().
  ExactRow(const RoutePath& path, const RouterSpec& spec, const float* bias, bool normalised);

  // Of one thread. At most kMostScratchBytes for E <= 4096, K <= 64 and up to 64 groups.
  int64_t scratch_bytes() const;

  // Parts of scratch_bytes() from `base` on, which is aligned to 64 bytes. K in whole vectors, so that the scores of
  // the chosen are not made one by one.
  struct Scratch {
    double* exact = nullptr;         // [chunk] scores before rounding
    double* terms = nullptr;         // [K]
    double* chosen_exact = nullptr;  // [K]
    uint64_t* keys = nullptr;        // see SelectScratch
    uint64_t* group_keys = nullptr;  // see SelectScratch
    float* scores = nullptr;         // [chunk]
    float* selection = nullptr;      // [chunk]
    float* chosen = nullptr;         // [K] logits of the chosen experts
    float* chosen_scores = nullptr;  // [K]
    int32_t* orders = nullptr;       // see Kernel::select; or [E] selection scores
  };
  Scratch scratch_at(std::byte* base) const { return lay_out(base, nullptr); }

  // logits: [E] finite; null: all 0. `scratch`: of any content.
  void route(const float* logits, const Scratch& scratch, int32_t* topk_idx, float* weights) const;

 private:
  // What a softmax over a row needs of all of it.
  struct Whole {
    double peak = 0;
    double sum = 0;
    bool has_scores = false;  // in the scratch, of the only chunk
  };

  Scratch lay_out(std::byte* base, int64_t* bytes) const;
  const float* logits_of(const float* logits, int64_t first, int64_t count,
                         const Scratch& scratch) const;
  Whole whole_of(const float* logits, const Scratch& scratch) const;
  const float* scores_of(const float* logits, int64_t count, const Whole& whole,
                         const Scratch& scratch) const;
  const float* selection_of(const float* logits, int64_t first, int64_t count, const Whole& whole,
                            const Scratch& scratch) const;
  void choose(const float* logits, const Whole& whole, const Scratch& scratch,
              int32_t* topk_idx) const;
  void gather(const float* logits, const Whole& whole, const int32_t* topk_idx,
              const Scratch& scratch) const;
  void weigh(const Scratch& scratch, float* weights) const;

  const Kernel& kernel_;
  const RouterSpec& spec_;
  const float* bias_;
  bool normalised_;
  int64_t chunk_;              // E, or kScoreChunk
  ScoreRow scores_ = nullptr;  // null: softmax, or the score is the logit
  ChosenTerms terms_ = nullptr;
  std::optional<SelectRules> rules_;  // nothing: select_experts()
};

}  // namespace argosy::router
