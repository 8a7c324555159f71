// Element casts and e8m0 against tables built from the definitions (kinds K17 and K18).
#include <gtest/gtest.h>
#include <immintrin.h>

#include <set>

#include "quant/quant_oracle.h"

namespace argosy::testing {
namespace {

constexpr ElementFormat kElements[] = {ElementFormat::kE4M3, ElementFormat::kE5M2,
                                       ElementFormat::kE2M1};
constexpr Overflow kModes[] = {Overflow::kSaturate, Overflow::kNaN};

uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }

void expect_same(ElementFormat format, float value) {
  for (const Overflow mode : kModes) {
    ASSERT_EQ(encode_element(format, value, mode), oracle_encode(format, value, mode))
        << name_of(format) << " of " << value << " bits " << std::hex << bits(value)
        << (mode == Overflow::kNaN ? " nan" : " saturate");
  }
}

void expect_same_around(ElementFormat format, float value) {
  for (const float sign : {1.0f, -1.0f}) {
    const float at = sign * value;
    expect_same(format, at);
    expect_same(format, std::nextafter(at, 0.0f));
    expect_same(format, std::nextafter(at, sign * INFINITY));
  }
}

TEST(Element, EveryCodeDecodesByDefinitionAndEncodesBack) {
  for (const ElementFormat format : kElements) {
    for (int code = 0; code < 2 * sign_bit(format); ++code) {
      const float value = decode_element(format, static_cast<uint8_t>(code));
      ASSERT_EQ(bits(value), bits(oracle_decode(format, code))) << name_of(format) << code;
      if (std::isnan(value) || std::isinf(value)) continue;
      ASSERT_EQ(encode_element(format, value), code);
    }
  }
}

TEST(Element, MidpointsAndTheirNeighbours) {
  for (const ElementFormat format : kElements) {
    for (int code = 0; code < max_code(format); ++code) {
      const double middle = (definition(format, code) + definition(format, code + 1)) / 2;
      expect_same_around(format, static_cast<float>(middle));
      const int even = code % 2 == 0 ? code : code + 1;
      EXPECT_EQ(encode_element(format, static_cast<float>(middle)), even);  // C166
    }
    expect_same_around(
        format, static_cast<float>((definition(format, max_code(format)) + beyond(format)) / 2));
  }
}

TEST(Element, EveryExponentManyMantissas) {
  for (const ElementFormat format : kElements) {
    for (uint32_t field = 0; field < 256; ++field) {
      for (uint32_t mantissa :
           {0u, 1u, 0x3FFFFFu, 0x400000u, 0x400001u, 0x600000u, 0x680000u, 0x700000u, 0x7FFFFFu}) {
        for (const uint32_t sign : {0u, 1u}) {
          expect_same(format, std::bit_cast<float>(sign << 31 | field << 23 | mantissa));
        }
      }
    }
  }
}

TEST(Element, EveryBf16AndASweepOfFp32AreMonotone) {
  for (const ElementFormat format : kElements) {
    for (uint32_t word = 0; word < 0x10000; ++word)
      expect_same(format, std::bit_cast<float>(word << 16));
    uint8_t last = 0;
    for (uint32_t word = 0; word < 0x7F800000; word += 4099) {
      const float value = std::bit_cast<float>(word);
      expect_same(format, value);
      const uint8_t code = encode_element(format, value);
      ASSERT_GE(code, last);
      last = code;
    }
  }
}

TEST(Element, NamedCases) {
  const auto e4m3 = [](float value, Overflow mode = Overflow::kSaturate) {
    return encode_element(ElementFormat::kE4M3, value, mode);
  };
  for (const float big : {448.0f, 464.0f, 464.0001f, 465.0f, 480.0f, 500.0f, 1000.0f, INFINITY}) {
    EXPECT_EQ(e4m3(big), 0x7E);  // C162, C170
  }
  EXPECT_EQ(e4m3(-1000.0f), 0xFE);
  EXPECT_EQ(e4m3(464.0f, Overflow::kNaN), 0x7E);
  EXPECT_EQ(e4m3(464.0001f, Overflow::kNaN), 0x7F);
  EXPECT_EQ(e4m3(-INFINITY, Overflow::kNaN), 0xFF);
  for (int m = 1; m < 8; ++m) {
    EXPECT_EQ(decode_element(ElementFormat::kE4M3, static_cast<uint8_t>(m)),
              static_cast<float>(m) * 0x1p-9f);  // C169
  }
  EXPECT_EQ(e4m3(0.0005f), 0);  // C171
  EXPECT_EQ(e4m3(0x1p-10f), 0);
  EXPECT_EQ(e4m3(-0x1p-10f), 0x80);
  EXPECT_EQ(e4m3(std::nextafter(0x1p-10f, 1.0f)), 1);
  EXPECT_EQ(e4m3(-0.0f), 0x80);
  EXPECT_EQ(e4m3(NAN), 0x7F);
  EXPECT_EQ(encode_element(ElementFormat::kE5M2, 1e30f, Overflow::kNaN), 0x7C);
  EXPECT_EQ(encode_element(ElementFormat::kE2M1, -1e30f, Overflow::kNaN), 0xF);
  EXPECT_EQ(encode_element(ElementFormat::kE2M1, -NAN), 0x8);
  EXPECT_EQ(pack_e2m1(0x3, 0xC), 0xC3);
}

TEST(Element, DoesNotDependOnTheCallersFloatingPointEnvironment) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040u | 0x6000u);  // FTZ, DAZ, round towards zero
  const uint8_t code = encode_element(ElementFormat::kE4M3, 0x1.9p-9f);
  const float value = decode_e8m0(0);
  const uint8_t exact = encode_e8m0(0x1p-127f, E8M0Rule::kFloor);
  _mm_setcsr(saved);
  EXPECT_EQ(code, 2);
  EXPECT_EQ(bits(value), 0x00400000u);
  EXPECT_EQ(exact, 0);
}

TEST(E8M0, EveryCodeIsItsPowerOfTwo) {
  for (int code = 0; code < 256; ++code) {
    const float value = decode_e8m0(static_cast<uint8_t>(code));
    ASSERT_EQ(bits(value), bits(oracle_e8m0(code))) << code;
    const Result<uint8_t> back = encode_e8m0_exact(value);
    ASSERT_TRUE(back.has_value()) << code;
    EXPECT_EQ(*back, code);
    if (code == 255) continue;
    EXPECT_EQ(encode_e8m0(value, E8M0Rule::kFloor), code);
    EXPECT_EQ(encode_e8m0(value, E8M0Rule::kCeil), code);
  }
  EXPECT_EQ(bits(1.0f / decode_e8m0(254)), 0x00400000u);  // C175
  EXPECT_EQ(bits(1.0f / decode_e8m0(0)), 0x7F000000u);
  EXPECT_EQ(decode_element(ElementFormat::kE4M3, 0x38) * decode_e8m0(0), 0x1p-127f);  // C178
}

TEST(E8M0, RulesAreThoseOfExactArithmetic) {
  for (uint32_t field = 0; field < 255; ++field) {
    for (uint32_t mantissa : {0u, 1u, 0x3FFFFFu, 0x400000u, 0x400001u, 0x7FFFFFu}) {
      const float value = std::bit_cast<float>(field << 23 | mantissa);
      ASSERT_EQ(encode_e8m0(value, E8M0Rule::kFloor),
                oracle_e8m0_code(static_cast<double>(value), false))
          << value;
      ASSERT_EQ(encode_e8m0(value, E8M0Rule::kCeil),
                oracle_e8m0_code(static_cast<double>(value), true))
          << value;
    }
  }
  const float table[] = {0x1p-149f, 0x1p-128f, 0x1p-127f, 0x1.8p-127f, 0x1p-126f};  // C182
  const int floor_codes[] = {0, 0, 0, 0, 1}, ceil_codes[] = {0, 0, 0, 1, 1};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(encode_e8m0(table[i], E8M0Rule::kFloor), floor_codes[i]);
    EXPECT_EQ(encode_e8m0(table[i], E8M0Rule::kCeil), ceil_codes[i]);
  }
  EXPECT_EQ(encode_e8m0(std::numeric_limits<float>::max(), E8M0Rule::kCeil), 254);  // C180
  EXPECT_EQ(encode_e8m0(INFINITY, E8M0Rule::kCeil), 255);
  EXPECT_EQ(encode_e8m0(NAN, E8M0Rule::kFloor), 255);
}

TEST(E8M0, OtherThanPowersOfTwoAreRefusedByValue) {
  for (const float scale : {1.5f, -1.0f, 0.0f, 0x1p-128f, INFINITY}) {
    const Result<uint8_t> code = encode_e8m0_exact(scale);  // C185
    ASSERT_FALSE(code.has_value()) << scale;
    EXPECT_EQ(code.error().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_NE(encode_e8m0_exact(1.5f).error().message().find("1.5"), std::string::npos);
}

}  // namespace
}  // namespace argosy::testing
