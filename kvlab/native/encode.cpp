// One token's keys or values into a cache of codes: bit for bit what quantization.encode writes.
//
// The arithmetic is a few hundred operations. In PyTorch it is twenty calls, and at one token calls are what costs.

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "rows.h"

static bf16 narrow(float x) {  // to the nearest, ties to even
    const uint32_t bits = same_bits<uint32_t>(x);
    return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

// A scale >= 0 as stored: rounded up, so that codes reach both ends; 1 for constant groups.
static bf16 rounded_up(float scale, float largest) {
    scale = std::min(scale, FLT_MAX / largest / 4);  // level * scale stays finite
    if (scale == 0.f) return narrow(1.f);
    bf16 stored = narrow(scale);
    stored.bits += widen(stored) < scale;  // the next float is the next integer
    return stored;
}

static bf16 rounded_down(float low) {
    const float most = widen(bf16{0x7F7F});
    low = std::clamp(low, -most, most);
    const bf16 stored = narrow(low);
    if (widen(stored) <= low) return stored;
    const float step = std::ldexp(std::fabs(low), -7);  // bf16 has 7 bits of mantissa
    return narrow(std::max(low - step - 0x1p-133f, -most));
}

static void encode_row(const float* numbers, const Rows& into, uint8_t* codes, bf16* scales, bf16* minima) {
    const int64_t row_bytes = into.width * into.bits / 8;
    const float largest = static_cast<float>((1 << into.bits) - 1);
    std::fill_n(codes, row_bytes, uint8_t{0});
    for (int64_t first = 0, i = 0; first < into.width; first += into.channels, ++i) {
        const auto [low, high] = std::minmax_element(numbers + first, numbers + first + into.channels);
        minima[i] = rounded_down(*low);
        const float minimum = widen(minima[i]);
        scales[i] = rounded_up(std::max(*high - minimum, 0.f) / largest, largest);
        const float scale = widen(scales[i]);
        for (int64_t d = first; d < first + into.channels; ++d) {
            const float level = std::clamp(std::rint((numbers[d] - minimum) / scale), 0.f, largest);
            codes[d % row_bytes] |= static_cast<uint8_t>(level) << (d / row_bytes * into.bits);
        }
    }
}

static uint8_t narrow_e4m3(float x) {  // to the nearest, ties to even; |x| at most 448
    const float magnitude = std::fabs(x);
    const uint32_t bits = same_bits<uint32_t>(magnitude), sign = same_bits<uint32_t>(x) >> 31 << 7;
    if (magnitude < 0x1p-6f) return sign | static_cast<uint8_t>(std::rint(magnitude * 0x1p9f));  // no leading one
    return sign | (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3));  // 3 of 23 bits of mantissa, bias 7
}

static void encode_row_e4m3(const float* numbers, const Rows& into, uint8_t* codes, bf16* scales) {
    constexpr float largest = 448.f;
    for (int64_t first = 0, i = 0; first < into.width; first += into.channels, ++i) {
        float most = 0.f;
        for (int64_t d = first; d < first + into.channels; ++d) most = std::max(most, std::fabs(numbers[d]));
        scales[i] = rounded_up(most / largest, largest);
        const float scale = widen(scales[i]);
        for (int64_t d = first; d < first + into.channels; ++d)
            codes[d] = narrow_e4m3(std::clamp(numbers[d] / scale, -largest, largest));
    }
}

// A row of numbers into slot `slot` of row (b, h).
static void write_row(const float* numbers, const Rows& into, int64_t b, int64_t h, int64_t slot) {
    const int64_t at = b * into.scale_b + h * into.scale_h + slot * into.scale_slot;
    uint8_t* codes = into.data + b * into.data_b + h * into.data_h + slot * into.width * into.bits / 8;
    bf16 *scales = static_cast<bf16*>(into.scales) + at, *minima = static_cast<bf16*>(into.minima) + at;
    into.kind == E4M3 ? encode_row_e4m3(numbers, into, codes, scales) : encode_row(numbers, into, codes, scales, minima);
}

// numbers (B, H_kv, 1, D) into slot `slot` of codes (B, H_kv, C, D) with bf16 scales
extern "C" void encode(const Rows* numbers, const Rows* into, int64_t B, int64_t H_kv, int64_t slot) {
    const Reader read = reader_of<4>(*numbers);  // of plain numbers, whatever their width
    float row[MOST_CHANNELS];
    for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < H_kv; ++h) {
            read(*numbers, b, h, 0, 1, row);
            write_row(row, *into, b, h, slot);
        }
}

// numbers (N, H_kv, 1, D), token n into slot offsets[n] of block blocks[n] of pools (pool_blocks, H_kv, block_size, D).
// Returns the first token whose slot is in no block, with nothing written, or -1.
extern "C" int64_t encode_paged(const Rows* numbers, const Rows* into, const int64_t* blocks, const int64_t* offsets,
                                int64_t N, int64_t H_kv, int64_t pool_blocks, int64_t block_size) {
    for (int64_t n = 0; n < N; ++n)
        if (blocks[n] < 0 || blocks[n] >= pool_blocks || offsets[n] < 0 || offsets[n] >= block_size) return n;
    const Reader read = reader_of<4>(*numbers);
    float row[MOST_CHANNELS];
    for (int64_t n = 0; n < N; ++n)
        for (int64_t h = 0; h < H_kv; ++h) {
            read(*numbers, n, h, 0, 1, row);
            write_row(row, *into, blocks[n], h, offsets[n]);
        }
    return -1;
}
