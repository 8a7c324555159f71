// The panel layout: where elements lie, that padding is zero, and index arithmetic beyond 32 bits.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "argosy/gemm.h"
#include "gemm/packed_layout.h"
#include "support/float_cases.h"

namespace argosy {
namespace {

using gemm::packed_shape;
using Kind = PackedWeights::Kind;
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

TEST(PackedLayout, Bf16TilesAreWhatTheTileInstructionsRead) {
  // 16 k-pairs by 16 columns by 2 parities, 512 elements a tile, two tiles a block of 32 k.
  EXPECT_EQ(gemm::bf16_offset_in_panel(0, 0), 0);
  EXPECT_EQ(gemm::bf16_offset_in_panel(1, 0), 1);
  EXPECT_EQ(gemm::bf16_offset_in_panel(0, 1), 2);
  EXPECT_EQ(gemm::bf16_offset_in_panel(2, 0), 64);
  EXPECT_EQ(gemm::bf16_offset_in_panel(31, 15), 15 * 64 + 31);
  EXPECT_EQ(gemm::bf16_offset_in_panel(0, 16), 32);
  EXPECT_EQ(gemm::bf16_offset_in_panel(32, 0), 1024);
  EXPECT_EQ(gemm::f32_offset_in_panel(3, 5), 101);
}

TEST(PackedLayout, EveryElementHasItsOwnPlace) {
  std::set<int64_t> bf16, f32;
  for (int64_t k = 0; k < 96; ++k) {
    for (int64_t column = 0; column < 32; ++column) {
      bf16.insert(gemm::bf16_offset_in_panel(k, column));
      f32.insert(gemm::f32_offset_in_panel(k, column));
    }
  }
  for (const auto& offsets : {bf16, f32}) {
    EXPECT_EQ(offsets.size(), 96u * 32u);
    EXPECT_EQ(*offsets.begin(), 0);
    EXPECT_EQ(*offsets.rbegin(), 96 * 32 - 1);
  }
}

// Kind K16: the same arithmetic in 128 bits, on both sides of every width.
TEST(PackedLayout, OffsetsAreExactAtEveryWidth) {
  EXPECT_EQ(gemm::row_offset(1525201, 2816) + 2815, 4294968831);                   // C155
  EXPECT_EQ(gemm::panel_offset(511, 0, 1, int64_t{2} * 1024 * 4096), 4286578688);  // C158
  EXPECT_EQ(gemm::row_offset(1079839, 2048), 2211510272);                          // C159
  for (const int width : {15, 16, 31, 32, 33, 47}) {
    for (int64_t delta = -2; delta <= 2; ++delta) {
      const int64_t row = (int64_t{1} << width) + delta;
      const auto exact = static_cast<__int128>(row) * 4099;
      EXPECT_TRUE(gemm::row_offset(row, 4099) == exact) << row;
      EXPECT_TRUE(gemm::panel_offset(row, 3, 7, 512) == (static_cast<__int128>(row) * 7 + 3) * 512)
          << row;
      const int64_t k = row - row % 32;
      EXPECT_EQ(gemm::bf16_offset_in_panel(k + 5, 17), k * 32 + 2 * 64 + 17 * 2 + 1) << row;
      EXPECT_EQ(gemm::f32_offset_in_panel(k, 31), k * 32 + 31) << row;
      EXPECT_EQ(gemm::up_column(k).panel, k / 16) << row;
      EXPECT_EQ(gemm::up_column(k).column, 16 + k % 16) << row;
    }
  }
}

TEST(PackedShape, PadsColumnsAndK) {
  const auto plain = packed_shape(Kind::kPlain, DType::kBF16, 3, 33, 33);
  ASSERT_TRUE(plain.has_value());
  EXPECT_EQ(plain->num_panels, 2);
  EXPECT_EQ(plain->padded_k, 64);
  EXPECT_EQ(plain->panel_bytes, 64 * 32 * 2);
  EXPECT_EQ(plain->total_bytes, 3 * 2 * 64 * 32 * 2);
  const auto gate_up = packed_shape(Kind::kGateUp, DType::kF32, 1, 33, 32);
  ASSERT_TRUE(gate_up.has_value());
  EXPECT_EQ(gate_up->num_panels, 3);
  EXPECT_EQ(gate_up->panel_bytes, 32 * 32 * 4);
  const auto large = packed_shape(Kind::kPlain, DType::kBF16, 512, 2 * 1024, 4096);
  ASSERT_TRUE(large.has_value());
  EXPECT_EQ(large->total_bytes, int64_t{512} * 2 * 1024 * 4096 * 2) << "beyond 32 bits";
}

TEST(PackedShape, RefusesWhatDoesNotFitAndNamesIt) {
  struct Row {
    int64_t groups, n, k;
    StatusCode code;
    const char* part;
  };
  const Row rows[] = {
      {-1, 1, 1, StatusCode::kInvalidArgument, "got -1, 1, 1"},
      {1, 0, 1, StatusCode::kInvalidArgument, "got 1, 0, 1"},
      {1, 1, 0, StatusCode::kInvalidArgument, "got 1, 1, 0"},
      {1, kInt64Max, 1, StatusCode::kInvalidArgument, "9223372036854775807"},
      {1, 1, kInt64Max, StatusCode::kInvalidArgument, "9223372036854775807"},
      {kInt64Max, 1, 1, StatusCode::kInvalidArgument, "9223372036854775807"},
      {int64_t{1} << 40, int64_t{1} << 40, 32, StatusCode::kInvalidArgument, "1099511627776"},
      {1, int64_t{1} << 24, int64_t{1} << 24, StatusCode::kOutOfMemory, "562949953421312 bytes"},
  };
  for (const Row& row : rows) {
    const auto weights =
        PackedWeights::create(Kind::kPlain, DType::kBF16, row.groups, row.n, row.k);
    ASSERT_FALSE(weights.has_value()) << row.part;
    EXPECT_EQ(weights.error().code(), row.code) << weights.error().to_string();
    EXPECT_NE(weights.error().message().find(row.part), std::string::npos)
        << weights.error().to_string();
  }
  const auto dtype = PackedWeights::create(Kind::kPlain, DType::kI32, 1, 1, 1);
  ASSERT_FALSE(dtype.has_value());
  EXPECT_NE(dtype.error().message().find("I32"), std::string::npos);
}

TEST(PackedWeights, NoGroupsIsLegal) {
  const auto weights = PackedWeights::create(Kind::kPlain, DType::kBF16, 0, 5, 7);
  ASSERT_TRUE(weights.has_value());
  EXPECT_EQ(weights->num_bytes(), 0);
  EXPECT_EQ(weights->n(), 5);
}

// Whether element (k, column) of a panel is `want` where there is a weight, and zero in the
// padding.
void expect_panel_column(const PackedWeights& weights, int64_t group, gemm::PanelColumn at,
                         const std::vector<BFloat16>& matrix, int64_t n) {
  for (int64_t k = 0; k < weights.padded_k(); ++k) {
    const bool real = n < weights.n() && k < weights.k();
    const BFloat16 want = real ? matrix[static_cast<size_t>(n * weights.k() + k)] : BFloat16{};
    ASSERT_EQ(gemm::bf16_at(weights.panel(group, at.panel), k, at.column), want) << n << " " << k;
  }
}

TEST(PackedWeights, RoundTripsWithZeroPaddingAlsoWhenSetTwice) {
  std::mt19937 rng(3);
  for (const int64_t n : {1, 15, 16, 17, 31, 32, 33, 70}) {
    for (const int64_t k : {1, 2, 31, 32, 33, 65}) {
      auto weights = PackedWeights::create(Kind::kGateUp, DType::kBF16, 2, n, k);
      ASSERT_TRUE(weights.has_value());
      std::vector<BFloat16> gate, up;
      for (int repeat = 0; repeat < 2; ++repeat) {
        gate = testing::random_bf16(rng, testing::Values::kSpecial, static_cast<size_t>(n * k));
        up = testing::random_bf16(rng, testing::Values::kSpecial, static_cast<size_t>(n * k));
        ASSERT_TRUE(weights
                        ->set_group(1, ConstTensorView(gate.data(), DType::kBF16, {n, k}),
                                    ConstTensorView(up.data(), DType::kBF16, {n, k}))
                        .ok());
      }
      for (int64_t column = 0; column < weights->num_panels() * 16; ++column) {
        expect_panel_column(*weights, 1, gemm::gate_column(column), gate, column);
        expect_panel_column(*weights, 1, gemm::up_column(column), up, column);
        expect_panel_column(*weights, 0, gemm::gate_column(column), {}, n);  // never set: zeros
      }
    }
  }
}

TEST(PackedWeights, TakesAnyStridesAndAnyAlignment) {
  constexpr int64_t kN = 33, kK = 37;
  // Element (n, k) is n * 100 + k, stored by k first, backwards in n, one byte off its alignment.
  std::vector<std::byte> bytes(static_cast<size_t>(kN * kK * 4 + 1));
  for (int64_t n = 0; n < kN; ++n) {
    for (int64_t k = 0; k < kK; ++k) {
      const auto value = static_cast<float>(n * 100 + k);
      std::memcpy(bytes.data() + 1 + (k * kN + (kN - 1 - n)) * 4, &value, 4);
    }
  }
  ConstTensorView view(bytes.data() + 1 + (kN - 1) * 4, DType::kF32, {kN, kK});
  view.strides = {-1, kN};
  auto weights = PackedWeights::create(Kind::kPlain, DType::kF32, 1, kN, kK);
  ASSERT_TRUE(weights->set_group(0, view).ok());
  for (int64_t n = 0; n < kN; ++n) {
    const gemm::PanelColumn at = gemm::plain_column(n);
    for (int64_t k = 0; k < kK; ++k) {
      ASSERT_EQ(gemm::f32_at(weights->panel(0, at.panel), k, at.column),
                static_cast<float>(n * 100 + k));
    }
  }
}

TEST(PackedWeights, PanelsAre64ByteAligned) {
  const auto weights = PackedWeights::create(Kind::kPlain, DType::kBF16, 3, 65, 33);
  for (int64_t group = 0; group < 3; ++group) {
    for (int64_t panel = 0; panel < 3; ++panel) {
      const auto address = reinterpret_cast<uintptr_t>(weights->panel(group, panel));
      EXPECT_EQ(address % 64, 0u);
      EXPECT_EQ(weights->panel(group, panel) - weights->panel(0, 0),
                gemm::panel_offset(group, panel, weights->num_panels(), weights->panel_bytes()));
    }
  }
}

TEST(PackedWeights, SetGroupErrorsNameValues) {
  const std::vector<float> data(64);
  const ConstTensorView good(data.data(), DType::kBF16, {4, 8});
  auto plain = PackedWeights::create(Kind::kPlain, DType::kBF16, 2, 4, 8);
  auto gate_up = PackedWeights::create(Kind::kGateUp, DType::kBF16, 2, 4, 8);
  struct Row {
    Status status;
    const char* part;
  };
  const Row rows[] = {
      {plain->set_group(2, good), "group 2 is outside [0, 2)"},
      {plain->set_group(-1, good), "group -1 is outside [0, 2)"},
      {plain->set_group(0, good, good), "packed weights are plain, the call is for gate_up"},
      {gate_up->set_group(0, good), "packed weights are gate_up, the call is for plain"},
      {plain->set_group(0, ConstTensorView(data.data(), DType::kBF16, {8, 4})), "w is BF16 [8, 4]"},
      {plain->set_group(0, ConstTensorView(data.data(), DType::kF32, {4, 8})), "hold BF16 [4, 8]"},
      {plain->set_group(0, ConstTensorView(data.data(), DType::kBF16, {32})), "w is BF16 [32]"},
      {plain->set_group(0,
                        ConstTensorView(static_cast<const void*>(nullptr), DType::kBF16, {4, 8})),
       "has no data"},
      {gate_up->set_group(0, good, ConstTensorView(data.data(), DType::kBF16, {5, 8})),
       "up is BF16 [5, 8]"},
      {gate_up->set_group(0, ConstTensorView(data.data(), DType::kBF16, {4, 9}), good),
       "gate is BF16 [4, 9]"},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(row.status.code(), StatusCode::kInvalidArgument) << row.part;
    EXPECT_NE(row.status.message().find(row.part), std::string::npos) << row.status.to_string();
  }
}

TEST(PackedWeights, BiasesLieAsTheColumnsDoAlsoWhenSetTwice) {
  for (const Kind kind : {Kind::kPlain, Kind::kGateUp}) {
    for (const bool is_bf16 : {false, true}) {
      constexpr int64_t kN = 37;
      PackedWeights packed = PackedWeights::create(kind, DType::kF32, 3, kN, 5).value();
      const int64_t bytes = packed.num_bytes();
      EXPECT_FALSE(packed.has_bias());
      EXPECT_EQ(packed.bias_of_panel(0, 0), nullptr);
      ASSERT_TRUE(packed.add_bias().ok());
      EXPECT_TRUE(packed.has_bias());
      EXPECT_EQ(packed.num_bytes() - bytes, 3 * packed.num_panels() * 128);
      // Every second element of a longer vector; multiples of 1/4 that bf16 holds.
      std::vector<float> wide(4 * kN);
      for (size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<float>(i + 1) * 0.25f;
      std::vector<BFloat16> narrow;
      for (const float value : wide) narrow.push_back(BFloat16::from_float(value));
      const auto view = [&](size_t first) {
        ConstTensorView bias = is_bf16 ? ConstTensorView(narrow.data() + first, DType::kBF16, {kN})
                                       : ConstTensorView(wide.data() + first, DType::kF32, {kN});
        bias.strides[0] = 2;
        return bias;
      };
      for (const size_t first : {1u, 0u}) {
        const Status status = kind == Kind::kPlain
                                  ? packed.set_bias(1, view(first))
                                  : packed.set_bias(1, view(first), view(first + 2 * kN));
        ASSERT_TRUE(status.ok()) << status.to_string();
      }
      ASSERT_TRUE(packed.add_bias().ok());  // changes nothing
      for (int64_t group = 0; group < 3; ++group) {
        for (int64_t panel = 0; panel < packed.num_panels(); ++panel) {
          for (int64_t column = 0; column < 32; ++column) {
            const bool is_up = kind == Kind::kGateUp && column >= 16;
            const int64_t n = kind == Kind::kPlain ? panel * 32 + column : panel * 16 + column % 16;
            const auto at = static_cast<size_t>(2 * n) + (is_up ? 2 * kN : 0);
            const float want = group == 1 && n < kN ? wide[at] : 0.0f;
            EXPECT_EQ(packed.bias_of_panel(group, panel)[column], want)
                << group << " " << panel << " " << column;
          }
        }
      }
    }
  }
}

TEST(PackedWeights, BiasErrorsNameValues) {
  const std::vector<float> values(8, 1.0f);
  const ConstTensorView right(values.data(), DType::kF32, {4});
  PackedWeights plain = PackedWeights::create(Kind::kPlain, DType::kBF16, 2, 4, 8).value();
  const auto refuse = [](const Status& status, std::initializer_list<const char*> parts) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    for (const char* part : parts) {
      EXPECT_NE(status.message().find(part), std::string::npos) << part << ": " << status.message();
    }
  };
  refuse(plain.set_bias(0, right), {"add_bias"});
  ASSERT_TRUE(plain.add_bias().ok());
  EXPECT_TRUE(plain.set_bias(1, right).ok());
  refuse(plain.set_bias(2, right), {"group 2"});
  refuse(plain.set_bias(-1, right), {"group -1"});
  refuse(plain.set_bias(0, right, right), {"plain", "gate_up"});
  refuse(plain.set_bias(0, ConstTensorView(values.data(), DType::kF32, {5})), {"[5]", "[4]"});
  refuse(plain.set_bias(0, ConstTensorView(values.data(), DType::kF32, {1, 4})), {"[1, 4]"});
  refuse(plain.set_bias(0, ConstTensorView(values.data(), DType::kF16, {4})), {"F16"});
  refuse(plain.set_bias(0, ConstTensorView(static_cast<const void*>(nullptr), DType::kF32, {4})),
         {"no data"});
  PackedWeights gate_up = PackedWeights::create(Kind::kGateUp, DType::kBF16, 2, 4, 8).value();
  ASSERT_TRUE(gate_up.add_bias().ok());
  refuse(gate_up.set_bias(0, right), {"plain", "gate_up"});
  refuse(gate_up.set_bias(0, right, ConstTensorView(values.data(), DType::kF32, {3})),
         {"up bias", "[3]"});
  refuse(PackedWeights().add_bias(), {"never created"});
  PackedWeights none = PackedWeights::create(Kind::kPlain, DType::kBF16, 0, 4, 8).value();
  EXPECT_TRUE(none.add_bias().ok());
  EXPECT_TRUE(none.has_bias());
}

}  // namespace
}  // namespace argosy
