// The moves of the backward, each build against the definition through the panel's accessors, and
// the streaming stores.
//
// Mutation tried, it makes a test fail: alpha and the main gradient by FMA.
#include "gemm/backward_moves.h"

#include <random>
#include <set>
#include <utility>

#include "gemm/backward_case.h"
#include "gemm/gradient_store.h"
#include "gemm/packed_layout.h"
#include "platform/float_env.h"

namespace argosy::gemm {
namespace {

using testing::below;
using testing::TestMatrix;
using testing::Values;

struct Build {
  const char* name;
  const MoveKernels* moves;
};
std::vector<Build> builds() {
  std::vector<Build> all = {{"base", &base_moves()}};
  if ((*cpu_info())->has(Level::kAvx2)) all.push_back({"avx2", &avx2_moves()});
  if ((*cpu_info())->has(Level::kAvx512)) all.push_back({"avx512", &avx512_moves()});
  return all;
}

// Bits of element (k, column) of a panel's only block.
uint32_t panel_bits(DType dtype, const std::byte* block, int64_t k, int64_t column) {
  const float value =
      dtype == DType::kF32 ? f32_at(block, k, column) : bf16_at(block, k, column).to_float();
  return testing::bits_of(value);
}

uint32_t bits(const TestMatrix& matrix, int64_t row, int64_t column) {
  return testing::bits_of(matrix.get(row, column));
}

struct alignas(64) Block {
  std::byte bytes[kBlockK * kPanelColumns * 4];
};

TEST(BackwardMoves, PackAndTransposeRowsOfAnySize) {
  constexpr uint32_t kSeed = 20241112;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  for (const Build& build : builds()) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      for (int round = 0; round < 40; ++round) {
        const bool is_whole = round % 4 == 0;
        const int64_t rows = is_whole ? 32 : 1 + below(rng, 32);
        const int64_t columns = is_whole ? 32 : 1 + below(rng, 32);
        TestMatrix matrix(dtype, rows, columns, below(rng, 5));
        matrix.fill(rng, Values::kSpecial, 0, rows);
        const ConstTensorView view = std::as_const(matrix).view();
        const MatrixBlock from{view.data, view.stride(0) * size_of(dtype), rows, columns};
        Block packed, transposed;
        std::memset(&packed, 0xA5, sizeof(packed));
        std::memset(&transposed, 0xA5, sizeof(transposed));
        pack_rows(*build.moves, dtype, from, packed.bytes);
        const int64_t stride = 32 * size_of(dtype);
        transpose_rows(*build.moves, dtype, from, transposed.bytes, stride);
        for (int64_t r = 0; r < 32; ++r) {
          for (int64_t c = 0; c < 32; ++c) {
            const uint32_t want = r < rows && c < columns ? bits(matrix, r, c) : 0;
            ASSERT_EQ(panel_bits(dtype, packed.bytes, r, c), want)
                << build.name << " round " << round;
            const float got =
                load_element(transposed.bytes + c * stride + r * size_of(dtype), dtype);
            ASSERT_EQ(testing::bits_of(got), want) << build.name << " round " << round;
          }
        }
      }
    }
  }
}

TEST(BackwardMoves, TransposesTilesOfPackedWeights) {
  std::mt19937 rng(20241113);
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    TestMatrix w(dtype, 32, 96);
    w.fill(rng, Values::kSpecial, 0, 32);
    PackedWeights packed =
        PackedWeights::create(PackedWeights::Kind::kPlain, dtype, 1, 32, 96).value();
    ASSERT_TRUE(packed.set_group(0, std::as_const(w).view()).ok());
    for (const Build& build : builds()) {
      for (const int64_t k_block : {0, 2}) {
        for (const auto& [tile, half] : {std::pair{0, 1}, std::pair{1, 0}}) {
          Block block;
          std::memset(&block, 0xA5, sizeof(block));
          transpose_weights(*build.moves, dtype, packed.panel(0, 0), tile, k_block, half,
                            block.bytes);
          for (int64_t n = 0; n < 16; ++n) {
            for (int64_t k = 0; k < 32; ++k) {
              ASSERT_EQ(panel_bits(dtype, block.bytes, half * 16 + n, k),
                        bits(w, tile * 16 + n, k_block * 32 + k))
                  << build.name << " tile " << tile << " n " << n << " k " << k;
            }
          }
        }
      }
    }
  }
}

// Past the caches or not: the same bits, and nothing beyond the columns.
TEST(GradientStore, EveryBuildGivesTheSameBits) {
  std::mt19937 rng(20241114);
  std::set<const GradientStores*> all = {&base_gradient_stores()};
  for (const Level level : testing::usable_levels()) all.insert(&gradient_stores_for(level));
  for (int round = 0; round < 200; ++round) {
    const Values values = testing::kAllValues[static_cast<size_t>(round % 4)];
    const DType dtype = round % 2 == 0 ? DType::kF32 : DType::kBF16;
    const bool accumulate = round % 8 >= 4;
    const int64_t rows = 1 + below(rng, 5), columns = 1 + below(rng, 32);
    Block sums;
    const std::vector<float> products = testing::random_f32(rng, values, 5 * 32);
    std::memcpy(&sums, products.data(), products.size() * sizeof(float));
    Block main;
    std::memset(&main, 0xFF, sizeof(main));
    const int64_t stride = 64 * size_of(dtype);
    for (int64_t i = 0; accumulate && i < 5 * 64; ++i) {
      store_element(main.bytes + i * size_of(dtype), dtype, testing::random_f32(rng, values, 1)[0]);
    }
    GradientStoreArgs args;
    args.sums = reinterpret_cast<const float*>(&sums);
    args.num_rows = rows;
    args.num_columns = columns;
    args.row_stride_bytes = stride;
    args.alpha = round % 3 == 0 ? 1.0f : testing::random_f32(rng, values, 1)[0];
    Block want = main;
    const platform::ScopedFloatEnv keep(platform::Denormals::kKeep);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        store_gradient(want.bytes + r * stride + c * size_of(dtype), dtype,
                       products[static_cast<size_t>(r * 32 + c)], args.alpha, accumulate);
      }
    }
    for (const GradientStores* stores : all) {
      const auto expect = [&](GradientStore store) {
        Block got = main;
        args.out = got.bytes;
        store(args);
        ASSERT_EQ(std::memcmp(&got, &want, sizeof(got)), 0) << "round " << round;
      };
      expect(stores->of[dtype == DType::kF32 ? 1 : 0][accumulate ? 1 : 0]);
      if (dtype == DType::kF32 && !accumulate && stores->stream_f32 != nullptr) {
        expect(stores->stream_f32);
      }
    }
  }
}

}  // namespace
}  // namespace argosy::gemm
