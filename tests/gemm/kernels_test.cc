// The kernel tables themselves, each build of each level, whatever this CPU would choose: golden
// bits, and the canonical dot products on rows that end exactly where their memory ends.
#include "gemm/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "argosy/gemm.h"
#include "gemm/packed_layout.h"
#include "numeric/dot.h"
#include "platform/float_env.h"
#include "support/float_cases.h"
#include "support/golden_file.h"

namespace argosy::gemm {
namespace {

using testing::bits_of;
using testing::Values;

struct Build {
  const char* name;
  const KernelTable* table;
};

std::vector<Build> builds() {
  std::vector<Build> all = {{"reference", &reference_kernels()}, {"generic", &generic_kernels()}};
  const auto add = [&all](Level needed, const char* name, const KernelTable& table) {
    if ((*cpu_info())->has(needed)) all.push_back({name, &table});
  };
  add(Level::kAvx2, "generic_fma", generic_fma_kernels());
  add(Level::kAvx2, "avx2", avx2_kernels());
  add(Level::kAvx512, "avx512", avx512_kernels());
  add(Level::kAvx512Bf16, "avx512_bf16", avx512_bf16_kernels());
  add(Level::kAvx512Bf16, "avx512_bf16, half width", avx512_bf16_half_width_kernels());
  add(Level::kAmx, "amx", amx_kernels());
  return all;
}

// Rows in blocks as the kernel takes them.
struct Fetch {
  uintptr_t from = 0;
  int64_t lines = 0;
};
std::vector<float> run_dot(const Dot& whole, const void* rows, int64_t row_bytes, int64_t num_rows,
                           const PackedWeights& w, const Fetch& fetch = {}) {
  const auto values = static_cast<size_t>(num_rows * kPanelColumns);
  const auto bytes = static_cast<int64_t>(values * sizeof(float));
  Result<AlignedBuffer> scratch = AlignedBuffer::allocate(bytes);
  DotArgs args;
  args.k = w.k();
  args.panel = w.panel(0, 0);
  args.prefetch = fetch.from;
  args.prefetch_lines = fetch.lines;
  for (int64_t first = 0; first < num_rows; first += args.num_rows) {
    args.num_rows = std::min(whole.row_block, num_rows - first);
    const Dot& dot = whole.for_rows(args.num_rows);
    args.rows = static_cast<const std::byte*>(rows) + first * row_bytes;
    args.row_stride_bytes = row_bytes;
    Result<AlignedBuffer> staged =
        AlignedBuffer::allocate(args.num_rows * (w.padded_k() / kBlockK) * dot.staged_bytes);
    if (dot.stage != nullptr) {
      dot.stage({args.rows, row_bytes, args.num_rows, args.k, staged->data()});
      args.rows = staged->data();
    }
    args.scratch = reinterpret_cast<float*>(scratch->data()) + first * kPanelColumns;
    const platform::ScopedFloatEnv flush(platform::Denormals::kFlush);
    dot.run(args);
  }
  std::vector<float> out(values);
  std::memcpy(out.data(), scratch->data(), static_cast<size_t>(bytes));
  return out;
}

PackedWeights packed(DType dtype, const void* w, int64_t n, int64_t k) {
  Result<PackedWeights> weights =
      PackedWeights::create(PackedWeights::Kind::kPlain, dtype, 1, n, k);
  EXPECT_TRUE(weights->set_group(0, ConstTensorView(w, dtype, {n, k})).ok());
  return std::move(weights).value();
}

TEST(Kernels, GoldenBitsOfBothOrders) {
  const testing::GoldenFile golden("golden/dot_orders.safetensors");
  for (const auto& [name, entry] : golden.header().items()) {
    if (!name.ends_with(".x")) continue;
    const std::string set = name.substr(0, name.size() - 2);
    const auto x = golden.read<BFloat16>(name);
    const auto w = golden.read<BFloat16>(set + ".w");
    const int64_t k = golden.shape(name)[1];
    const PackedWeights weights = packed(DType::kBF16, w.data(), 16, k);
    for (const Build& build : builds()) {
      for (const auto& [order, dot] : {std::pair{".amx", build.table->bf16_amx},
                                       std::pair{".vdpbf16", build.table->bf16_vdpbf16}}) {
        const auto want = golden.read<float>(set + order);
        const std::vector<float> got = run_dot(dot, x.data(), k * 2, 8, weights);
        for (size_t i = 0; i < want.size(); ++i) {
          ASSERT_EQ(bits_of(got[i / 16 * 32 + i % 16]), bits_of(want[i]))
              << build.name << " " << set << order << " " << i;
        }
      }
    }
  }
}

// NaN payloads and the sign of zero are canonical only after the epilogue for NaN, at once for
// zero.
uint32_t canonical(float value) { return value != value ? numeric::kCanonicalNaN : bits_of(value); }

template <typename X, typename W, typename Twin>
void expect_equal_to_twin(const Dot& dot, const std::vector<X>& x, const std::vector<W>& w,
                          int64_t n, int64_t k, Twin twin) {
  const DType dtype = sizeof(W) == 2 ? DType::kBF16 : DType::kF32;
  const PackedWeights weights = packed(dtype, w.data(), n, k);
  const auto num_rows = static_cast<int64_t>(x.size()) / k;
  // An exact heap block: the sanitizer sees a read past the last row's last element.
  const std::unique_ptr<X[]> rows(new X[x.size()]);
  std::copy(x.begin(), x.end(), rows.get());
  const auto got = run_dot(dot, rows.get(), k * int64_t{sizeof(X)}, num_rows, weights);
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      const std::span<const X> row(x.data() + r * k, static_cast<size_t>(k));
      const std::span<const W> column(w.data() + c * k, static_cast<size_t>(k));
      ASSERT_EQ(canonical(got[static_cast<size_t>(r * 32 + c)]), bits_of(twin(row, column)))
          << "row " << r << " of " << num_rows << " column " << c << " k " << k;
    }
  }
}

TEST(Kernels, EveryBuildGivesTheTwinsBits) {
  constexpr uint32_t kSeed = 20240614;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  using F32Span = std::span<const float>;
  using BF16Span = std::span<const BFloat16>;
  for (const Build& build : builds()) {
    for (const Values values : testing::kAllValues) {
      for (const int64_t k : {1, 2, 3, 31, 32, 33, 64, 65, 97}) {
        SCOPED_TRACE(build.name);
        SCOPED_TRACE(testing::name_of(values));
        const int64_t rows = 1 + static_cast<int64_t>(rng()) % 80;
        const int64_t n = 1 + static_cast<int64_t>(rng()) % 32;
        const auto x = testing::random_bf16(rng, values, static_cast<size_t>(rows * k));
        const auto w = testing::random_bf16(rng, values, static_cast<size_t>(n * k));
        const auto xf = testing::random_f32(rng, values, static_cast<size_t>(rows * k));
        const auto wf = testing::random_f32(rng, values, static_cast<size_t>(n * k));
        expect_equal_to_twin(build.table->bf16_amx, x, w, n, k, numeric::dot_amx);
        expect_equal_to_twin(build.table->bf16_vdpbf16, x, w, n, k, numeric::dot_vdpbf16);
        expect_equal_to_twin(build.table->f32_bf16, xf, w, n, k,
                             [](F32Span a, BF16Span b) { return numeric::dot_f32(a, b); });
        expect_equal_to_twin(build.table->f32_f32, xf, wf, n, k,
                             [](F32Span a, F32Span b) { return numeric::dot_f32(a, b); });
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A prefetch may point anywhere and changes nothing.
TEST(Kernels, PrefetchesChangeNoBits) {
  std::mt19937 rng(20240615);
  constexpr int64_t kK = 65, kMostRows = 13;
  const auto x = testing::random_bf16(rng, Values::kWide, kMostRows * kK);
  const PackedWeights weights =
      packed(DType::kBF16, testing::random_bf16(rng, Values::kWide, 32 * kK).data(), 32, kK);
  const std::vector<uintptr_t> places = {reinterpret_cast<uintptr_t>(weights.panel(0, 0)), 0};
  // Other kernels for every number of rows, and for a block's 32 lines.
  const auto run_all = [&](const Dot& dot, int64_t rows) {
    const std::vector<float> want = run_dot(dot, x.data(), kK * 2, rows, weights);
    for (const int64_t lines : {1, 16, 31, 32, 33}) {
      for (const uintptr_t from : places) {
        const std::vector<float> got = run_dot(dot, x.data(), kK * 2, rows, weights, {from, lines});
        ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0)
            << rows << " rows, lines " << lines;
      }
    }
  };
  for (const Build& build : builds()) {
    SCOPED_TRACE(build.name);
    for (int64_t rows = 1; rows <= kMostRows; ++rows) {
      run_all(build.table->bf16_amx, rows);
      run_all(build.table->bf16_vdpbf16, rows);
      if (HasFatalFailure()) return;
    }
  }
}

// Bit patterns of every exponent; gate and up meet NaN, Inf, denormals and results that round to them.
std::vector<float> patterns_of_every_kind(std::mt19937& rng, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = std::bit_cast<float>(static_cast<uint32_t>(rng()));
    if (i % 4 == 1) values[i] = std::bit_cast<float>(testing::random_bits(rng, Values::kSpecial));
    // Where exp is neither 0 nor 1, and where it underflows.
    if (i % 4 == 2) values[i] = static_cast<float>(static_cast<int32_t>(rng())) * 0x1p-24f;
  }
  return values;
}

TEST(Kernels, EveryStoreGivesTheBitsOfTheReference) {
  constexpr uint32_t kSeed = 20240616;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  constexpr int64_t kRows = 7, kStride = 160;
  using Pick = StoreKernel (*)(const Stores& stores, size_t bias);
  const std::pair<Pick, int64_t> picks[] = {
      {[](const Stores& stores, size_t bias) { return stores.plain[bias]; }, 32},
      {[](const Stores& stores, size_t bias) { return stores.gate_up[0][bias]; }, 16},
      {[](const Stores& stores, size_t bias) { return stores.gate_up[1][bias]; }, 16},
      {[](const Stores& stores, size_t bias) { return stores.gate_up[2][bias]; }, 16},
      {[](const Stores& stores, size_t bias) { return stores.gate_up[3][bias]; }, 16},
      {[](const Stores& stores, size_t bias) { return stores.gate_up[4][bias]; }, 16}};
  static_assert(kNumActivations == 5, "a new activation belongs into this list");
  for (int round = 0; round < 1200; ++round) {
    const std::vector<float> scratch = patterns_of_every_kind(rng, kRows * 32);
    const std::vector<float> bias = patterns_of_every_kind(rng, 32);
    for (const auto& [pick, most] : picks) {
      StoreArgs args;
      args.scratch = scratch.data();
      args.bias = bias.data();
      args.limit = round % 5 == 0 ? 0x1p-140f : round % 5 == 1 ? 0x1p100f : 7.0f;
      args.alpha = round % 7 == 0 ? 0x1p120f : 1.702f;
      args.num_rows = 1 + static_cast<int64_t>(rng()) % kRows;
      args.num_columns = round % 3 == 0 ? most : 1 + static_cast<int64_t>(rng()) % most;
      args.row_stride_bytes = kStride;
      const auto run = [&](const KernelTable& table) {
        std::vector<std::byte> out(kRows * kStride, std::byte{0xA5});
        args.out = out.data();
        const platform::ScopedFloatEnv keep(platform::Denormals::kKeep);
        const Stores& stores = round % 2 == 0 ? table.store_bf16 : table.store_f32;
        pick(stores, round % 4 / 2)(args);
        return out;
      };
      const std::vector<std::byte> want = run(reference_kernels());
      for (const Build& build : builds()) {
        ASSERT_TRUE(run(*build.table) == want)
            << build.name << " columns " << args.num_columns << " round " << round;
      }
    }
  }
}

// Two calls of 64 and 33 k, the second going on, give what one call of 97 does; rows of every count.
template <typename X, typename W>
void expect_resumes(const char* name, const Dot& whole, std::mt19937& rng) {
  constexpr int64_t kFirst = 64, kAll = 97;
  const DType dtype = sizeof(W) == 2 ? DType::kBF16 : DType::kF32;
  const int64_t num_rows = 1 + static_cast<int64_t>(rng()) % whole.row_block;
  const auto bits_as = [&rng](auto* values, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const uint32_t word = testing::random_bits(rng, Values::kWide);
      std::memcpy(values + i, reinterpret_cast<const std::byte*>(&word) + 4 - sizeof(*values),
                  sizeof(*values));
    }
  };
  std::vector<X> x(static_cast<size_t>(num_rows * kAll));
  std::vector<W> w(32 * kAll);
  bits_as(x.data(), x.size());
  bits_as(w.data(), w.size());
  const PackedWeights weights = packed(dtype, w.data(), 32, kAll);
  const std::vector<float> want =
      run_dot(whole, x.data(), kAll * int64_t{sizeof(X)}, num_rows, weights);
  const Dot& dot = whole.for_rows(num_rows);
  Result<AlignedBuffer> scratch = AlignedBuffer::allocate(num_rows * kPanelColumns * 4);
  Result<AlignedBuffer> staged = AlignedBuffer::allocate(num_rows * 2 * dot.staged_bytes);
  for (const int64_t first : {int64_t{0}, kFirst}) {
    DotArgs args;
    args.k = first == 0 ? kFirst : kAll - kFirst;
    args.num_rows = num_rows;
    args.rows = reinterpret_cast<const std::byte*>(x.data() + first);
    args.row_stride_bytes = kAll * int64_t{sizeof(X)};
    if (dot.stage != nullptr) {
      dot.stage({args.rows, args.row_stride_bytes, num_rows, args.k, staged->data()});
      args.rows = staged->data();
    }
    args.panel = weights.panel(0, 0) + first * kPanelColumns * int64_t{sizeof(W)};
    args.scratch = reinterpret_cast<float*>(scratch->data());
    args.resumes = first > 0;
    const platform::ScopedFloatEnv flush(platform::Denormals::kFlush);
    dot.run(args);
  }
  ASSERT_EQ(std::memcmp(scratch->data(), want.data(), want.size() * sizeof(float)), 0)
      << name << " rows " << num_rows;
}

TEST(Kernels, ChainsGoOnWhereTheyResume) {
  constexpr uint32_t kSeed = 20241115;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 rng(kSeed);
  for (const Build& build : builds()) {
    if (build.table == &reference_kernels()) continue;
    for (int round = 0; round < 12; ++round) {
      expect_resumes<BFloat16, BFloat16>(build.name, build.table->bf16_amx, rng);
      expect_resumes<BFloat16, BFloat16>(build.name, build.table->bf16_vdpbf16, rng);
      expect_resumes<float, BFloat16>(build.name, build.table->f32_bf16, rng);
      expect_resumes<float, float>(build.name, build.table->f32_f32, rng);
    }
  }
}

TEST(Kernels, RowBlocksFitTheDriversScratch) {
  for (const Build& build : builds()) {
    for (const Dot& dot : {build.table->bf16_amx, build.table->bf16_vdpbf16, build.table->f32_bf16,
                           build.table->f32_f32}) {
      EXPECT_GE(dot.row_block, 1) << build.name;
      EXPECT_LE(dot.row_block, kMaxRowBlock) << build.name;
    }
  }
}

}  // namespace
}  // namespace argosy::gemm
