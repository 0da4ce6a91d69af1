// Sixteen numbers at a time, and how fewer bits become a float.

#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>

constexpr int64_t LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * 4)));  // the compiler keeps one in one or two registers
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

template <typename To, typename From>
static inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "another size has other bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Sixteen small integers as wider ones. A loop: compilers make one instruction of it, but several of
// __builtin_convertvector.
template <typename Vector, typename T>
static inline Vector spread(const T* from) {
    Vector wide;
    for (int64_t i = 0; i < LANES; ++i) wide[i] = from[i];
    return wide;
}
static inline Lanes floats(Ints x) { return __builtin_convertvector(x, Lanes); }

// A finite float of BITS bits: they move to where fp32 has its exponent and mantissa, and a product makes up for
// fp32's larger exponent bias. Float and Bits are float and uint32_t, or sixteen of each.
template <int BITS, int MANTISSA, typename Float, typename Bits>
static inline Float widen_small(Bits bits) {
    constexpr int exponent = BITS - 1 - MANTISSA, bias = (1 << (exponent - 1)) - 1;
    constexpr uint32_t sign = 1u << (BITS - 1), rebias = static_cast<uint32_t>(127 + 127 - bias) << 23;
    const Bits magnitude = (bits & (sign - 1)) << (23 - MANTISSA);
    return same_bits<Float>(magnitude | (bits & sign) << (32 - BITS)) * same_bits<float>(rebias);
}

static inline float widen(bf16 x) { return same_bits<float>(static_cast<uint32_t>(x.bits) << 16); }
static inline float widen(fp16 x) { return widen_small<16, 10, float>(static_cast<uint32_t>(x.bits)); }

static inline Lanes load(const float* from) {
    Lanes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
static inline Lanes load(const bf16* from) { return same_bits<Lanes>(spread<Words>(&from->bits) << 16); }
static inline Lanes load(const fp16* from) { return widen_small<16, 10, Lanes>(spread<Words>(&from->bits)); }
static inline void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }

static inline Lanes larger(Lanes x, Lanes y) {
    for (int64_t i = 0; i < LANES; ++i) x[i] = x[i] < y[i] ? y[i] : x[i];
    return x;
}

// e^x for x <= 0, and 0 below -87, where fp32 ends. With n the whole number nearest to x / ln 2, e^x = 2^n e^r and
// |r| <= ln 2 / 2; there the series of e^r, cut after r^7, is off by less than 1e-8 of it.
static inline Lanes exp_of(Lanes x) {
    const Lanes shifter = Lanes{} + 0x1.8p23f;  // floats of this size have no fraction: adding it rounds
    const Lanes shifted = x * 1.442695041f + shifter, n = shifted - shifter;
    const Lanes r = (x - n * (355.f / 512)) + n * 2.12194440e-4f;  // ln 2 in two pieces: n * 355/512 is exact
    Lanes series = Lanes{} + 1.f / 5040;
    for (float term : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) series = series * r + term;
    const Words power = (same_bits<Words>(shifted) - same_bits<Words>(shifter) + 127) << 23;  // 2^n, by its exponent
    const Words kept = ~same_bits<Words>(x < -87.f);  // NaN is kept
    return same_bits<Lanes>(same_bits<Words>(series * same_bits<Lanes>(power)) & kept);
}

#ifdef __clang__
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, Words{__VA_ARGS__})
#endif

static inline float largest_of(Lanes x) {
    x = larger(x, SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = larger(x, SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = larger(x, SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = larger(x, SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return x[0];
}

// The sums of sixteen vectors at once. Adding up one vector takes a chain of shuffles; sixteen share them:
// each round adds neighbours, so that lane i ends as the sum of vector i.
static inline Lanes sums_of(const Lanes (&x)[LANES]) {
    Lanes half[8], quarter[4], eighth[2];
    for (int i = 0; i < 8; ++i)
        half[i] = SHUFFLE(x[2 * i], x[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                  SHUFFLE(x[2 * i], x[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (int i = 0; i < 4; ++i)
        quarter[i] = SHUFFLE(half[2 * i], half[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                     SHUFFLE(half[2 * i], half[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; ++i)
        eighth[i] =
            SHUFFLE(quarter[2 * i], quarter[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
            SHUFFLE(quarter[2 * i], quarter[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return SHUFFLE(eighth[0], eighth[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(eighth[0], eighth[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
