// Every refusal of grouped_gemm: the code, the values in the message, and an output left alone.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <vector>

#include "argosy/gemm.h"

namespace argosy {
namespace {

constexpr int64_t kRows = 10, kN = 4, kK = 8;
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

// A call that is right; each test makes one thing wrong.
struct Call {
  std::vector<float> x = std::vector<float>(kRows * kK, 1.0f);
  std::vector<float> out = std::vector<float>(kRows * kN, 7.0f);
  std::vector<int64_t> offsets = {0, 4, 4}, sizes = {4, 0, 6};
  GemmOptions options;
  ConstTensorView rows_view = ConstTensorView(x.data(), DType::kF32, {kRows, kK});
  TensorView out_view = TensorView(out.data(), DType::kF32, {kRows, kN});
  PackedWeights weights =
      PackedWeights::create(PackedWeights::Kind::kPlain, DType::kBF16, 3, kN, kK).value();

  Status run() { return grouped_gemm(options, {rows_view, offsets, sizes}, weights, out_view); }
};

TEST(Arguments, TheCallIsRightAsItStands) {
  Call call;
  const Status status = call.run();
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(call.out, std::vector<float>(kRows * kN, 0.0f));
}

struct Refusal {
  const char* name;
  std::function<void(Call&)> spoil;
  std::vector<const char*> parts;  // of the message
  StatusCode code = StatusCode::kInvalidArgument;
};

void expect_refused(const Refusal& refusal) {
  SCOPED_TRACE(refusal.name);
  Call call;
  refusal.spoil(call);
  const Status status = call.run();
  EXPECT_EQ(status.code(), refusal.code) << status.to_string();
  for (const char* part : refusal.parts) {
    EXPECT_NE(status.message().find(part), std::string::npos)
        << part << " in: " << status.message();
  }
  EXPECT_EQ(call.out, std::vector<float>(kRows * kN, 7.0f));
}

TEST(Arguments, Groups) {
  const Refusal refusals[] = {
      {"too few sizes", [](Call& c) { c.sizes.pop_back(); }, {"2 sizes", "3 offsets", "3 groups"}},
      {"too few offsets", [](Call& c) { c.offsets.pop_back(); }, {"2 offsets"}},
      {"too many offsets",
       [](Call& c) {
         c.offsets = {0, 4, 4, 10, 10};
       },
       {"5 offsets"}},
      {"leaves the rows",
       [](Call& c) { c.sizes[2] = 7; },
       {"group 2", "offset 4", "size 7", "10 rows"}},
      {"negative size", [](Call& c) { c.sizes[1] = -1; }, {"group 1", "size -1"}},
      {"negative offset", [](Call& c) { c.offsets[0] = -1; }, {"group 0", "offset -1"}},
      {"an empty group outside", [](Call& c) { c.offsets[1] = 11; }, {"group 1", "offset 11"}},
      {"a sum beyond int64", [](Call& c) { c.sizes[2] = kInt64Max; }, {"9223372036854775807"}},
      {"an offset beyond", [](Call& c) { c.offsets[2] = kInt64Max; }, {"9223372036854775807"}},
      {"overlap", [](Call& c) { c.offsets[2] = 3; }, {"group 2", "row 3", "end 4"}},
      {"falling offsets",
       [](Call& c) {
         c.offsets = {6, 4, 0};
       },
       {"group 1", "row 4", "end 10"}},
      {"a last offset inside",
       [](Call& c) {
         c.offsets = {0, 4, 4, 9};
       },
       {"last offset is 9", "end 10"}},
  };
  for (const Refusal& refusal : refusals) expect_refused(refusal);
}

TEST(Arguments, ShapesAndDtypes) {
  const Refusal refusals[] = {
      {"K differs", [](Call& c) { c.rows_view.shape[1] = 7; }, {"F32 [10, 7]", "8 columns"}},
      {"N differs", [](Call& c) { c.out_view.shape[1] = 5; }, {"out is F32 [10, 5]", "4 columns"}},
      {"rows differ", [](Call& c) { c.out_view.shape[0] = 9; }, {"F32 [9, 4]", "F32 [10, 8]"}},
      {"rows no matrix",
       [](Call& c) { c.rows_view.num_dims = 1; },
       {"rows is F32 [10]", "not a matrix"}},
      {"out no matrix", [](Call& c) { c.out_view.num_dims = 3; }, {"out is F32 [10, 4, 0]"}},
      {"rows dtype",
       [](Call& c) { c.rows_view.dtype = DType::kF16; },
       {"F16 [10, 8]", "BF16 or F32"}},
      {"out dtype",
       [](Call& c) { c.out_view.dtype = DType::kBF16; },
       {"BF16 [10, 4]", "F32 [10, 8]"}},
      {"rows K stride", [](Call& c) { c.rows_view.strides[1] = 2; }, {"rows", "stride 1"}},
      {"out n stride", [](Call& c) { c.out_view.strides[1] = 2; }, {"out", "stride 1"}},
      {"rows of out overlap",
       [](Call& c) { c.out_view.strides[0] = 3; },
       {"row stride 3", "4 columns"}},
      {"no data", [](Call& c) { c.rows_view.data = nullptr; }, {"rows F32 [10, 8] has no data"}},
      {"no output", [](Call& c) { c.out_view.data = nullptr; }, {"out F32 [10, 4] has no data"}},
      {"misaligned", [](Call& c) { c.rows_view.data += 2; }, {"not aligned to 4 bytes"}},
      {"out is in the rows",
       [](Call& c) { c.rows_view.data = c.out_view.data; },
       {"out [0x", "overlaps the rows [0x"}},
  };
  for (const Refusal& refusal : refusals) expect_refused(refusal);
}

TEST(Arguments, WeightsAndOptions) {
  const auto bf16 = [](Call& c) { c.rows_view.dtype = c.out_view.dtype = DType::kBF16; };
  const Refusal refusals[] = {
      {"fp32 weights with bf16 rows",
       [bf16](Call& c) {
         bf16(c);
         c.options.dot_order = DotOrder::kAmx;
         c.weights =
             PackedWeights::create(PackedWeights::Kind::kPlain, DType::kF32, 3, kN, kK).value();
       },
       {"BF16 rows with F32 weights"}},
      {"unresolved order", bf16, {"dot_order is auto", "amx or vdpbf16"}},
      {"weights never created",
       [](Call& c) {
         c.weights = PackedWeights();
         c.rows_view.shape[1] = c.out_view.shape[1] = 0;
       },
       {"never created"}},
      {"weights moved away",
       [](Call& c) { const PackedWeights gone = std::move(c.weights); },
       {"3 groups have no data"}},
      {"a level not built",
       [](Call& c) { c.options.level = Level::kAmx; },
       {"level amx", "reference, generic"},
       StatusCode::kUnsupported},
  };
  for (const Refusal& refusal : refusals) expect_refused(refusal);
}

TEST(Arguments, Activations) {
  const auto with = [](Activation activation) {
    return [activation](Call& c) {
      c.weights =
          PackedWeights::create(PackedWeights::Kind::kGateUp, DType::kBF16, 3, kN, kK).value();
      c.options.activation = activation;
    };
  };
  const Refusal refusals[] = {
      {"no limit", with({ActivationKind::kClampedSwiGlu, 0.0f, 1.0f}), {"limit", "is 0"}},
      {"a negative alpha", with({ActivationKind::kClampedSwiGlu, 7.0f, -1.0f}), {"alpha", "-1"}},
      {"an unknown kind", with({static_cast<ActivationKind>(9), 7.0f, 1.0f}), {"activation 9"}},
  };
  for (const Refusal& refusal : refusals) expect_refused(refusal);
  // Plain weights have no activation: what stands there is not read.
  Call call;
  call.options.activation.kind = static_cast<ActivationKind>(9);
  EXPECT_TRUE(call.run().ok());
}

// What no caller means, and memory corruption brings: refused, not followed.
TEST(Arguments, Nonsense) {
  const std::vector<Refusal> refusals = {
      {"dimensions below 0",
       [](Call& call) { call.rows_view.num_dims = -1; },
       {"rows", "a view of -1 dimensions"}},
      {"dimensions beyond the array",
       [](Call& call) { call.out_view.num_dims = 99; },
       {"out", "a view of 99 dimensions"}},
      {"a shape beyond all addresses",
       [](Call& call) { call.rows_view.shape[0] = call.out_view.shape[0] = int64_t{1} << 61; },
       {"rows", "2305843009213693952", "2^63 bytes"}},
      {"no level",
       [](Call& call) { call.options.level = static_cast<Level>(99); },
       {"(no level)", "generic"},
       StatusCode::kUnsupported},
  };
  for (const Refusal& refusal : refusals) expect_refused(refusal);
}

TEST(Arguments, Fp32RowsNeedNoOrder) {
  Call call;
  call.options.dot_order = DotOrder::kAuto;
  EXPECT_TRUE(call.run().ok());
}

TEST(Arguments, ZeroRowsNeedNoMemory) {
  Call call;
  call.rows_view = ConstTensorView(static_cast<const void*>(nullptr), DType::kF32, {0, kK});
  call.out_view = TensorView(nullptr, DType::kF32, {0, kN});
  call.offsets = {0, 0, 0};
  call.sizes = {0, 0, 0};
  EXPECT_TRUE(call.run().ok());
}

}  // namespace
}  // namespace argosy
