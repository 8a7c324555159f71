// One MoE layer with random weights over two ranks, and once more over one: the same bits.
//
// Public headers only. Ranks are threads here; each holds its own experts and its own tokens. Built
// and run against an installed Argosy by tests/package/.
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "argosy/moe.h"

namespace {

using argosy::DType;
using argosy::Result;
using argosy::Status;
using argosy::Tensor;

constexpr int64_t kNumTokens = 37;
constexpr int64_t kNumExperts = 8;
constexpr int64_t kTopK = 2;
constexpr int64_t kHidden = 64;
constexpr int64_t kIntermediate = 48;

// The same seed gives the same matrix, whoever asks.
Result<Tensor> random_matrix(int64_t rows, int64_t columns, uint64_t seed) {
  ARGOSY_ASSIGN_OR_RETURN(Tensor matrix, Tensor::zeros(DType::kF32, {rows, columns}));
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> uniform(-0.25f, 0.25f);
  float* values = matrix.view().as<float>();
  for (int64_t i = 0; i < rows * columns; ++i) values[i] = uniform(random);
  return matrix;
}

// The router, and the experts that this rank owns.
Result<argosy::MoeWeights> make_weights(int rank, int num_ranks) {
  using argosy::PackedWeights;
  const argosy::Placement placement{kNumExperts, num_ranks};
  const int64_t num_local = placement.num_local(rank);
  argosy::MoeWeights weights;
  weights.first_expert = placement.begin(rank);
  ARGOSY_ASSIGN_OR_RETURN(weights.gate, random_matrix(kNumExperts, kHidden, 1));
  ARGOSY_ASSIGN_OR_RETURN(
      weights.gate_up, PackedWeights::create(PackedWeights::Kind::kGateUp, DType::kF32, num_local,
                                             kIntermediate, kHidden));
  ARGOSY_ASSIGN_OR_RETURN(weights.down,
                          PackedWeights::create(PackedWeights::Kind::kPlain, DType::kF32, num_local,
                                                kHidden, kIntermediate));
  for (int64_t local = 0; local < num_local; ++local) {
    const auto seed = static_cast<uint64_t>(100 + 3 * (placement.begin(rank) + local));
    ARGOSY_ASSIGN_OR_RETURN(const Tensor gate, random_matrix(kIntermediate, kHidden, seed));
    ARGOSY_ASSIGN_OR_RETURN(const Tensor up, random_matrix(kIntermediate, kHidden, seed + 1));
    ARGOSY_ASSIGN_OR_RETURN(const Tensor down, random_matrix(kHidden, kIntermediate, seed + 2));
    ARGOSY_RETURN_IF_ERROR(weights.gate_up.set_group(local, gate.view(), up.view()));
    ARGOSY_RETURN_IF_ERROR(weights.down.set_group(local, down.view()));
  }
  return weights;
}

// This rank's tokens through the layer.
Status run_layer(argosy::Group& group, argosy::ConstTensorView hidden, argosy::TensorView output) {
  ARGOSY_ASSIGN_OR_RETURN(const argosy::RouterSpec router,
                          argosy::router_preset("mixtral", kNumExperts, kTopK));
  ARGOSY_ASSIGN_OR_RETURN(argosy::MoeWeights weights,
                          make_weights(group.rank(), group.num_ranks()));
  argosy::MoeOptions options;
  options.hidden_dtype = hidden.dtype;
  ARGOSY_ASSIGN_OR_RETURN(const auto layer,
                          argosy::MoeLayer::create(group, router, std::move(weights), options));
  const int64_t first = argosy::owned_begin(kNumTokens, group.num_ranks(), group.rank());
  const int64_t end = argosy::owned_begin(kNumTokens, group.num_ranks(), group.rank() + 1);
  argosy::MoeReport report;
  ARGOSY_RETURN_IF_ERROR(layer->forward(hidden.rows(first, end - first), nullptr,
                                        output.rows(first, end - first), &report));
  if (group.rank() == 0) {
    std::printf("%d ranks, %lld rounds, load balance %.3f\n", group.num_ranks(),
                static_cast<long long>(report.num_rounds),
                argosy::balancedness(report.rows_per_expert));
  }
  return {};
}

Status run_rank(int rank, int num_ranks, std::shared_ptr<argosy::InprocWorld> world,
                argosy::ConstTensorView hidden, argosy::TensorView output) {
  argosy::GroupOptions options;
  options.rank = rank;
  options.num_ranks = num_ranks;
  options.inproc = std::move(world);
  ARGOSY_ASSIGN_OR_RETURN(const auto group, argosy::Group::join(options));
  const Status status = run_layer(*group, hidden, output);
  if (!status.ok()) group->abort(status);  // nobody waits for a rank that gave up
  return status;
}

// The digest of the output over `num_ranks` ranks.
Result<std::string> run(int num_ranks) {
  ARGOSY_ASSIGN_OR_RETURN(const Tensor hidden, random_matrix(kNumTokens, kHidden, 2));
  ARGOSY_ASSIGN_OR_RETURN(Tensor output, Tensor::zeros(DType::kF32, {kNumTokens, kHidden}));
  ARGOSY_ASSIGN_OR_RETURN(const auto world, argosy::InprocWorld::create(num_ranks));
  std::vector<Status> status(static_cast<size_t>(num_ranks));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      status[static_cast<size_t>(rank)] =
          run_rank(rank, num_ranks, world, hidden.view(), output.view());
    });
  }
  for (std::thread& thread : ranks) thread.join();
  for (const Status& one : status) ARGOSY_RETURN_IF_ERROR(one);
  return argosy::digest_of(output.bytes());
}

}  // namespace

int main() {
  const Result<std::string> two = run(2);
  const Result<std::string> one = run(1);
  for (const Result<std::string>* result : {&two, &one}) {
    if (*result) continue;
    std::fprintf(stderr, "%s\n", result->error().to_string().c_str());
    return 1;
  }
  std::printf("digest %s\n", two->c_str());
  if (*one == *two) return 0;
  std::fprintf(stderr, "one rank gives %s\n", one->c_str());
  return 1;
}
