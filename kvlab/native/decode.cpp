// Attention of one query token over the slots of a cache, for a CPU.
//
// A decode step reads every stored key and value once and does little with each, so what counts is reading them
// once, in order, by all cores. The slots of each key/value head are cut into runs; each run is one task. A task reads
// a few slots at a time as floats, whatever they are stored as, into a buffer that stays in the first-level cache. It
// scores them for all G query heads that share the head and keeps a running softmax: the largest score, the sum of
// the weights, and the weighted values. Runs are then merged exactly as the parts of a view are in
// kvlab/attention.py. No buffer grows with the number of slots.

#include <algorithm>
#include <vector>

#include "online_softmax.h"
#include "rows.h"

constexpr int64_t SLOTS = 32;  // read at a time: few enough that memory is read while others are being scored

// One task: G query heads (G, D) over slots first .. end of row (b, h).
template <int64_t V>
static void attend_run(const float* queries, float scale, const Rows& keys, const Rows& values, int64_t b, int64_t h,
                       int64_t first, int64_t end, Partial<V>* partials, int64_t G) {
    const Reader read_keys = reader_of<V>(keys), read_values = reader_of<V>(values);
    std::vector<float> scaled(queries, queries + G * V * LANES), scores(G * SLOTS);
    for (float& x : scaled) x *= scale;
    alignas(64) float numbers[SLOTS * V * LANES] = {};
    for (; first < end; first += SLOTS) {
        const int64_t count = std::min(SLOTS, end - first);
        read_keys(keys, b, h, first, count, numbers);
        score<V>(scaled.data(), numbers, scores.data(), SLOTS, G, count);
        for (int64_t g = 0; g < G; ++g) partials[g].weights_of(scores.data() + g * SLOTS, count);
        read_values(values, b, h, first, count, numbers);
        weigh_all<V>(scores.data(), SLOTS, numbers, partials, G, count);
    }
}

template <int64_t V>
static void attend(const float* queries, const Rows& keys, const Rows& values, float* out, float* lse, int64_t B,
                   int64_t H_kv, int64_t G, int64_t S, float scale, int64_t threads) {
    const int64_t heads = B * H_kv, D = V * LANES;
    const int64_t wanted = std::max<int64_t>(1, 4 * threads / heads);  // enough tasks to share out evenly
    const int64_t runs = std::max<int64_t>(1, std::min(wanted, S / SLOTS)), length = (S + runs - 1) / runs;
    std::vector<Partial<V>> partials(heads * runs * G);

#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < heads * runs; ++task) {
        const int64_t head = task / runs, first = task % runs * length;
        attend_run<V>(queries + head * G * D, scale, keys, values, head / H_kv, head % H_kv, first,
                      std::min(S, first + length), partials.data() + task * G, G);
    }
    for (int64_t row = 0; row < heads * G; ++row)
        lse[row] = merge<V>(partials.data() + row / G * runs * G + row % G, runs, G, out + row * D);
}

// queries (B, H_kv, G, D) and out alike, lse (B, H_kv, G)
extern "C" void decode(const float* queries, const Rows* keys, const Rows* values, float* out, float* lse, int64_t B,
                       int64_t H_kv, int64_t G, int64_t S, float scale, int64_t threads) {
    if (keys->width == 64) attend<4>(queries, *keys, *values, out, lse, B, H_kv, G, S, scale, threads);
    if (keys->width == 128) attend<8>(queries, *keys, *values, out, lse, B, H_kv, G, S, scale, threads);
}
