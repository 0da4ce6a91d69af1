// Attention of one query token over the live slots of a cache, for a CPU.
//
// A decode step reads every stored key and value once and does little with each, so what counts is reading them
// once, in order, by all cores. The slots of each key/value head are cut into runs; each run is one task. A task
// scores its slots for all G query heads that share the head, takes a softmax of its own, and leaves three things:
// its largest score, the sum of its weights, and its weighted values. Runs are then merged exactly as parts of a
// view are in kvlab/attention.py, by the log-sum-exp of their scores.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

struct bf16 { uint16_t bits; };

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
static inline void narrow(float x, float& out) { out = x; }
static inline void narrow(float x, bf16& out) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    out.bits = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Sixteen floats that the compiler keeps in one or two registers.
constexpr int64_t LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

template <typename T>
static inline Lanes load(const T* from) {
    Lanes wide;
    for (int64_t i = 0; i < LANES; ++i) wide[i] = widen(from[i]);
    return wide;
}

// The sums of sixteen vectors at once. Adding up one vector takes a chain of shuffles; sixteen share them:
// each round adds neighbours, so that lane i ends as the sum of vector i.
static inline Lanes sums_of(const Lanes (&x)[LANES]) {
    Lanes half[8], quarter[4], eighth[2];
    for (int i = 0; i < 8; ++i)
        half[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                  __builtin_shufflevector(x[2 * i], x[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (int i = 0; i < 4; ++i)
        quarter[i] = __builtin_shufflevector(half[2 * i], half[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                     __builtin_shufflevector(half[2 * i], half[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; ++i)
        eighth[i] = __builtin_shufflevector(quarter[2 * i], quarter[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                    __builtin_shufflevector(quarter[2 * i], quarter[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return __builtin_shufflevector(eighth[0], eighth[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(eighth[0], eighth[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// scores[g * count + s] = query g . key s, for D = 16 * V
template <typename T, int64_t V>
static void score(const float* query, const T* keys, float* scores, int64_t G, int64_t count) {
    constexpr int64_t D = V * LANES;
    for (int64_t s = 0; s < count; s += LANES) {
        const int64_t some = std::min(LANES, count - s);
        for (int64_t g = 0; g < G; ++g) {
            Lanes q[V], products[LANES] = {};
            for (int64_t v = 0; v < V; ++v) q[v] = load(query + g * D + v * LANES);
            for (int64_t i = 0; i < some; ++i)
                for (int64_t v = 0; v < V; ++v) products[i] += q[v] * load(keys + (s + i) * D + v * LANES);
            const Lanes total = sums_of(products);
            for (int64_t i = 0; i < some; ++i) scores[g * count + s + i] = total[i];
        }
    }
}

// out[g] = sum over s of weights[g * count + s] * value s
template <typename T, int64_t V>
static void weigh(const float* weights, const T* values, float* out, int64_t G, int64_t count) {
    constexpr int64_t D = V * LANES, TOGETHER = 3;  // query heads whose sums stay in registers
    for (int64_t first = 0; first < G; first += TOGETHER) {
        const int64_t some = std::min(TOGETHER, G - first);
        Lanes sums[TOGETHER][V] = {};
        for (int64_t s = 0; s < count; ++s) {
            Lanes value[V];
            for (int64_t v = 0; v < V; ++v) value[v] = load(values + s * D + v * LANES);
            for (int64_t g = 0; g < TOGETHER; ++g) {
                const float w = weights[std::min(first + g, G - 1) * count + s];
                for (int64_t v = 0; v < V; ++v) sums[g][v] += w * value[v];
            }
        }
        for (int64_t g = 0; g < some; ++g) std::memcpy(out + (first + g) * D, sums[g], sizeof sums[g]);
    }
}

// queries (B, H_kv, G, D) and out alike; keys and values: row (b, h) begins at b * stride_b + h * stride_h,
// its slots follow each other, D elements each
template <typename T, int64_t V>
static void decode(const T* queries, const T* keys, const T* values, T* out, int64_t B, int64_t H_kv, int64_t G,
                   int64_t S, int64_t stride_b, int64_t stride_h, float scale, int64_t threads) {
    constexpr int64_t D = V * LANES;
    const int64_t heads = B * H_kv;
    const int64_t wanted = std::max<int64_t>(1, 4 * threads / heads);  // enough tasks to share out evenly
    const int64_t runs = std::max<int64_t>(1, std::min(wanted, S / 64));
    const int64_t length = (S + runs - 1) / runs;
    std::vector<float> top(heads * runs * G, -INFINITY), mass(heads * runs * G, 0.f), sums(heads * runs * G * D, 0.f);

#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < heads * runs; ++task) {
        const int64_t head = task / runs, first = (task % runs) * length;
        const int64_t count = std::min(S, first + length) - first;
        if (count <= 0) continue;
        const int64_t offset = head / H_kv * stride_b + head % H_kv * stride_h + first * D;
        std::vector<float> query(G * D), weights(G * count);
        for (int64_t i = 0; i < G * D; ++i) query[i] = widen(queries[head * G * D + i]) * scale;
        score<T, V>(query.data(), keys + offset, weights.data(), G, count);
        for (int64_t g = 0; g < G; ++g) {
            float* w = weights.data() + g * count;
            const float largest = *std::max_element(w, w + count);
            float sum = 0.f;
            for (int64_t s = 0; s < count; ++s) sum += (w[s] = std::exp(w[s] - largest));
            top[task * G + g] = largest;
            mass[task * G + g] = sum;
        }
        weigh<T, V>(weights.data(), values + offset, sums.data() + task * G * D, G, count);
    }

    for (int64_t row = 0; row < heads * G; ++row) {
        const int64_t head = row / G, g = row % G;
        float largest = -INFINITY, total = 0.f, merged[D] = {};
        for (int64_t run = 0; run < runs; ++run) largest = std::max(largest, top[(head * runs + run) * G + g]);
        for (int64_t run = 0; run < runs; ++run) {
            const int64_t at = (head * runs + run) * G + g;
            const float weight = std::exp(top[at] - largest);
            total += weight * mass[at];
            for (int64_t d = 0; d < D; ++d) merged[d] += weight * sums[at * D + d];
        }
        for (int64_t d = 0; d < D; ++d) narrow(merged[d] / total, out[row * D + d]);
    }
}

extern "C" void decode_fp32(const float* q, const float* k, const float* v, float* out, int64_t B, int64_t H_kv,
                            int64_t G, int64_t D, int64_t S, int64_t stride_b, int64_t stride_h, float scale,
                            int64_t threads) {
    if (D == 64) decode<float, 4>(q, k, v, out, B, H_kv, G, S, stride_b, stride_h, scale, threads);
    if (D == 128) decode<float, 8>(q, k, v, out, B, H_kv, G, S, stride_b, stride_h, scale, threads);
}

extern "C" void decode_bf16(const bf16* q, const bf16* k, const bf16* v, bf16* out, int64_t B, int64_t H_kv,
                            int64_t G, int64_t D, int64_t S, int64_t stride_b, int64_t stride_h, float scale,
                            int64_t threads) {
    if (D == 64) decode<bf16, 4>(q, k, v, out, B, H_kv, G, S, stride_b, stride_h, scale, threads);
    if (D == 128) decode<bf16, 8>(q, k, v, out, B, H_kv, G, S, stride_b, stride_h, scale, threads);
}
