// See gradient_norm.h.
#include "moe/gradient_norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace argosy {
namespace {

// A run of values whose squares are one sum: an expert's part of a tensor, or a whole one.
struct Piece {
  const float* values;
  int64_t count;
};

int64_t num_pieces(const WeightGradient& gradient) {
  if (!gradient.is_given()) return 0;
  return gradient.is_expert ? gradient.view.dim(0) : 1;
}

Piece piece_of(const WeightGradient& gradient, int64_t index) {
  const int64_t count = gradient.view.num_elements() / std::max<int64_t>(num_pieces(gradient), 1);
  return {gradient.view.as<float>() + index * count, count};
}

double squares(const Piece& piece) {
  constexpr int64_t kLanes = 16;
  std::array<double, kLanes> lanes{};
  for (int64_t at = 0; at < piece.count; at += kLanes) {
    const int64_t n = std::min(kLanes, piece.count - at);
    for (int64_t lane = 0; lane < n; ++lane) {
      // Exact before it is added: the square of 24 bits.
      const auto value = static_cast<double>(piece.values[at + lane]);
      lanes[static_cast<size_t>(lane)] += value * value;
    }
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

std::string place_of(const TensorView& view, int64_t first_dim, int64_t at) {
  std::string text = "]";
  for (int d = view.num_dims - 1; d >= first_dim; --d) {
    text = fmt::format("{}{}{}", d > first_dim ? ", " : "[", at % view.dim(d), text);
    at /= view.dim(d);
  }
  return text;
}

}  // namespace

std::array<WeightGradient, 12> weight_gradients(const MoeGradients& g) {
  return {{{"d_expert_gate", g.d_expert_gate, true},
           {"d_expert_up", g.d_expert_up, true},
           {"d_expert_down", g.d_expert_down, true},
           {"d_expert_gate_bias", g.d_expert_gate_bias, true},
           {"d_expert_up_bias", g.d_expert_up_bias, true},
           {"d_expert_down_bias", g.d_expert_down_bias, true},
           {"d_gate", g.d_gate, false},
           {"d_gate_bias", g.d_gate_bias, false},
           {"d_shared_gate", g.d_shared_gate, false},
           {"d_shared_up", g.d_shared_up, false},
           {"d_shared_down", g.d_shared_down, false},
           {"d_shared_scale", g.d_shared_scale, false}}};
}

int64_t num_local_experts(const MoeGradients& gradients) {
  for (const WeightGradient& gradient : weight_gradients(gradients)) {
    if (gradient.is_expert && gradient.is_given()) return gradient.view.dim(0);
  }
  return 0;
}

Status check_weight_gradients(const MoeGradients& gradients) {
  const int64_t num_local = num_local_experts(gradients);
  for (const WeightGradient& gradient : weight_gradients(gradients)) {
    const TensorView& view = gradient.view;
    if (!gradient.is_given()) continue;
    const bool has_data = view.data != nullptr || view.num_elements() == 0;
    if (view.dtype != DType::kF32 || !view.is_dense() || !has_data || view.num_dims < 1) {
      return base::invalid("{} is {}{}, wanted dense F32", gradient.name, describe(view),
                           has_data ? "" : " without data");
    }
    if (gradient.is_expert && view.dim(0) != num_local) {
      return base::invalid("{} is {}, the first one given is of {} experts", gradient.name,
                           describe(view), num_local);
    }
  }
  return {};
}

Result<SquareSums> sum_squares(RowGather& rows, int rank, int num_ranks, ThreadPool& pool,
                               const MoeGradients& gradients) {
  const auto all = weight_gradients(gradients);
  std::vector<Piece> pieces;
  for (const WeightGradient& gradient : all) {
    for (int64_t i = 0; i < num_pieces(gradient); ++i) pieces.push_back(piece_of(gradient, i));
  }
  std::vector<double> sums(pieces.size());
  pool.parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t at, int) {
    sums[static_cast<size_t>(at)] = squares(pieces[static_cast<size_t>(at)]);
  });
  const int64_t num_local = num_local_experts(gradients);
  std::vector<double> experts(static_cast<size_t>(num_local));
  double replicated = 0;
  size_t piece = 0;
  for (const WeightGradient& gradient : all) {
    for (int64_t i = 0; i < num_pieces(gradient); ++i) {
      (gradient.is_expert ? experts[static_cast<size_t>(i)] : replicated) += sums[piece++];
    }
  }
  AlignedBuffer counts_room, sums_room;
  const std::byte* bytes = nullptr;
  std::vector<int64_t> counts(static_cast<size_t>(num_ranks), 1);
  ARGOSY_RETURN_IF_ERROR(rows.gather(counts, sizeof(int64_t),
                                     reinterpret_cast<const std::byte*>(&num_local), &counts_room,
                                     &bytes));
  std::memcpy(counts.data(), bytes, counts.size() * sizeof(int64_t));
  ARGOSY_RETURN_IF_ERROR(rows.gather(counts, sizeof(double),
                                     reinterpret_cast<const std::byte*>(experts.data()), &sums_room,
                                     &bytes));
  SquareSums result;
  for (int peer = 0; peer < num_ranks; ++peer) {
    const int64_t count = counts[static_cast<size_t>(peer)];
    if (peer < rank) result.first_expert += count;
    for (int64_t i = 0; i < count; ++i, bytes += sizeof(double)) {
      double one = 0;
      std::memcpy(&one, bytes, sizeof(one));
      result.sum += one;
    }
  }
  result.sum += replicated;
  return result;
}

std::string find_nonfinite(const MoeGradients& gradients, int64_t first_expert) {
  for (const WeightGradient& gradient : weight_gradients(gradients)) {
    for (int64_t i = 0; i < num_pieces(gradient); ++i) {
      const Piece piece = piece_of(gradient, i);
      for (int64_t at = 0; at < piece.count; ++at) {
        if (std::isfinite(piece.values[at])) continue;
        return fmt::format(
            "{}{} is {} at {}", gradient.name,
            gradient.is_expert ? fmt::format(" of expert {}", first_expert + i) : std::string(),
            piece.values[at], place_of(gradient.view, gradient.is_expert ? 1 : 0, at));
      }
    }
  }
  return {};
}

Result<double> gradient_norm(Group& group, const MoeGradients& gradients) {
  // Also a rank that cannot go on takes part, so that the others learn it at once.
  const Status local = check_weight_gradients(gradients);
  const Status agreed =
      group.agree({{"gradient_norm.check", local.ok() ? std::string() : local.to_string()}});
  ARGOSY_RETURN_IF_ERROR(local);
  ARGOSY_RETURN_IF_ERROR(agreed);
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<RowGather> rows, RowGather::create(group));
  ARGOSY_ASSIGN_OR_RETURN(
      const SquareSums squares,
      sum_squares(*rows, group.rank(), group.num_ranks(), group.pool(), gradients));
  return std::sqrt(squares.sum);
}

}  // namespace argosy
