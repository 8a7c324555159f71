// What every level does with a panel that has scales on either side, included into the anonymous namespace of its
// file (scales into fp32, codes into a block of bf16). Test: tests/gemm/quantised_gemm_test.cc.

// The 32 columns' scales at block `block` of panel.block_k.
ARGOSY_KERNEL_INLINE void load_scales(const CodedPanel& panel, int64_t block, float* scales) {
  if (panel.layout.block_k == 0) {
    for (int64_t c = 0; c < kPanelColumns; ++c) scales[c] = 1.0f;
    return;
  }
  const std::byte* from =
      panel.panel + scale_block_offset(panel.layout, block >> panel.block_shift);
  if (panel.layout.has_f32_scales()) {
    std::memcpy(scales, from, kPanelColumns * sizeof(float));
    return;
  }
  uint16_t bits[kPanelColumns];
  std::memcpy(bits, from, sizeof(bits));
  for (int64_t c = 0; c < kPanelColumns; ++c) {
    scales[c] = std::bit_cast<float>(static_cast<uint32_t>(bits[c]) << 16);
  }
}

// The rows' scales at that block.
ARGOSY_KERNEL_INLINE const float* row_scales_at(const DotArgs& args, const CodedPanel& panel,
                                                int64_t block) {
  return panel.rows.values + (block >> panel.rows.block_shift) * args.num_rows;
}

// Block `k_block` of 32 k as bf16: where the panel is decoded already, or in `room`.
ARGOSY_KERNEL_INLINE const std::byte* decoded_block(const CodedPanel& panel, int64_t k_block,
                                                    std::byte* room) {
  if (panel.decoded != nullptr) return panel.decoded + k_block * kDecodedBlockBytes;
  panel.decode(panel.panel + codes_offset(panel.layout, k_block), room);
  return room;
}
