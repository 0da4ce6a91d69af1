// How keys or values lie in a cache, and how some of their rows become floats.

#pragma once
#include "lanes.h"

enum Kind : int64_t { FP32, BF16, UNSIGNED, SIGNED, E4M3, E5M2 };  // the same order as in rows.py

// One stored tensor (B, H_kv, S, D), filled in by rows.py: numbers, or codes with number = level * scale + minimum;
// without minima, number = (level - zero) * scale.
struct Rows {
    uint8_t* data;               // row (b, h) begins at b * data_b + h * data_h bytes, its slots follow each other
    void *scales, *minima;       // 16-bit floats, both laid out alike
    int64_t data_b, data_h;      // strides in bytes
    int64_t scale_b, scale_h, scale_slot;  // strides in elements; scale_slot from one group of tokens to the next
    int64_t kind, bits, width;   // width: D
    int64_t channels, tokens;    // that share a scale: some channels of one token, or one channel of some tokens
    int64_t scales_are_fp16;     // or else bf16
    float zero;
};

constexpr int64_t MOST_CHANNELS = 128;  // the widest row that is read

// How the levels 16 v .. 16 v + 15 of a row of 16 V codes are had. Codes of fewer than 8 bits lie in planes (see
// packing.py): byte i holds the numbers i, i + D * BITS / 8, ..., the first in its lowest bits.
template <int BITS>
struct Unsigned {
    static Lanes levels(const uint8_t* row, int64_t v, int64_t V) {
        const int64_t plane = V * BITS / 8;  // vectors of numbers in one
        const Words bytes = spread<Words>(row + v % plane * LANES);
        return floats(same_bits<Ints>(bytes >> static_cast<uint32_t>(v / plane * BITS) & ((1u << BITS) - 1)));
    }
};
struct Signed {
    static Lanes levels(const uint8_t* row, int64_t v, int64_t) {
        return floats(spread<Ints>(reinterpret_cast<const int8_t*>(row) + v * LANES));
    }
};
template <int MANTISSA>
struct Float8 {
    static Lanes levels(const uint8_t* row, int64_t v, int64_t) {
        return widen_small<8, MANTISSA, Lanes>(spread<Words>(row + v * LANES));
    }
};

// Reads slots first .. first + count of row (b, h) as floats, (count, D).
typedef void (*Reader)(const Rows&, int64_t b, int64_t h, int64_t first, int64_t count, float* out);

template <typename T>
static void read_numbers(const Rows& rows, int64_t b, int64_t h, int64_t first, int64_t count, float* out) {
    const T* numbers = reinterpret_cast<const T*>(rows.data + b * rows.data_b + h * rows.data_h) + first * rows.width;
    for (int64_t i = 0, end = count * rows.width; i < end; i += LANES) store(out + i, load(numbers + i));
}

template <typename Codes, typename Scale, int64_t V>
static void read_codes(const Rows& rows, int64_t b, int64_t h, int64_t first, int64_t count, float* out) {
    const int64_t head = b * rows.scale_b + h * rows.scale_h;
    const Scale* scales = static_cast<const Scale*>(rows.scales) + head;
    const Scale* minima = rows.minima ? static_cast<const Scale*>(rows.minima) + head : nullptr;
    const int64_t row_bytes = V * LANES * rows.bits / 8, per = rows.channels / LANES;
    const int64_t tokens = rows.tokens, slot = rows.scale_slot;  // copies: stores through `out` might change `rows`
    const float zero = rows.zero;
    const uint8_t* row = rows.data + b * rows.data_b + h * rows.data_h + first * row_bytes;
    for (int64_t s = first; s < first + count; ++s, row += row_bytes, out += V * LANES) {
        const int64_t at = s / tokens * slot;
        if (tokens > 1) {  // a scale for every channel
            for (int64_t v = 0; v < V; ++v) {
                const Lanes scale = load(scales + at + v * LANES);
                const Lanes offset = minima ? load(minima + at + v * LANES) : scale * -zero;
                store(out + v * LANES, Codes::levels(row, v, V) * scale + offset);
            }
        } else if (per == V) {  // one for the row: the loop is unrolled
            const float scale = widen(scales[at]), offset = minima ? widen(minima[at]) : scale * -zero;
            for (int64_t v = 0; v < V; ++v) store(out + v * LANES, Codes::levels(row, v, V) * scale + offset);
        } else {  // one for `per` vectors of channels
            for (int64_t v = 0, i = at; v < V; ++i) {
                const float scale = widen(scales[i]), offset = minima ? widen(minima[i]) : scale * -zero;
                for (const int64_t next = v + per; v < next; ++v)
                    store(out + v * LANES, Codes::levels(row, v, V) * scale + offset);
            }
        }
    }
}

template <typename Codes, int64_t V>
static Reader code_reader(const Rows& rows) {
    return rows.scales_are_fp16 ? read_codes<Codes, fp16, V> : read_codes<Codes, bf16, V>;
}

template <int64_t V>
static Reader reader_of(const Rows& rows) {
    switch (rows.kind) {
        case FP32: return read_numbers<float>;
        case BF16: return read_numbers<bf16>;
        case SIGNED: return code_reader<Signed, V>(rows);
        case E4M3: return code_reader<Float8<3>, V>(rows);
        case E5M2: return code_reader<Float8<2>, V>(rows);
    }
    if (rows.bits == 2) return code_reader<Unsigned<2>, V>(rows);
    return rows.bits == 4 ? code_reader<Unsigned<4>, V>(rows) : code_reader<Unsigned<8>, V>(rows);
}
