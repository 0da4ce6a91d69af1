// One token's keys or values into a cache of affine codes: bit for bit what quantization.encode writes.
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
        scales[i] = rounded_up((*high - minimum) / largest, largest);
        const float scale = widen(scales[i]);
        for (int64_t d = first; d < first + into.channels; ++d) {
            const float level = std::clamp(std::rint((numbers[d] - minimum) / scale), 0.f, largest);
            codes[d % row_bytes] |= static_cast<uint8_t>(level) << (d / row_bytes * into.bits);
        }
    }
}

// numbers (B, H_kv, 1, D) into slot `slot` of codes (B, H_kv, C, D) with bf16 scales and minima
extern "C" void encode(const Rows* numbers, const Rows* into, int64_t B, int64_t H_kv, int64_t slot) {
    const Reader read = reader_of<4>(*numbers);  // of plain numbers, whatever their width
    float row[MOST_CHANNELS];
    for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < H_kv; ++h) {
            read(*numbers, b, h, 0, 1, row);
            const int64_t at = b * into->scale_b + h * into->scale_h + slot * into->scale_slot;
            uint8_t* codes = into->data + b * into->data_b + h * into->data_h + slot * into->width * into->bits / 8;
            encode_row(row, *into, codes, static_cast<bf16*>(into->scales) + at, static_cast<bf16*>(into->minima) + at);
        }
}
