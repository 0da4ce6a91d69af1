// Attention of one query token over the slots of a cache, for a CPU.
//
// A decode step reads every stored key and value once and does little with each, so what counts is reading them
// once, in order, by all cores. The slots of each key/value head are cut into runs; each run is one task. A task reads
// a few slots at a time as floats, whatever they are stored as, into a buffer that stays in the first-level cache. It
// scores them for all G query heads that share the head and keeps a running softmax: the largest score, the sum of
// the weights, and the weighted values. Runs are then merged exactly as the parts of a view are in
// kvlab/attention.py. No buffer grows with the number of slots.

#include <algorithm>
#include <cmath>
#include <vector>

#include "rows.h"

constexpr int64_t SLOTS = 32;  // read at a time: few enough that memory is read while others are being scored

// Softmax attention of one query head over the slots so far: sums / mass, weights being relative to e^top.
template <int64_t V>
struct Partial {
    float top = -INFINITY;
    Lanes mass = {};  // in sixteen shares
    alignas(64) float sums[V * LANES] = {};

    // Turn the scores of `count` more slots into weights; what was summed before shrinks when a larger score comes.
    void weights_of(float* scores, int64_t count) {
        for (int64_t s = count; s < SLOTS; ++s) scores[s] = -INFINITY;
        Lanes most = load(scores);
        for (int64_t s = LANES; s < SLOTS; s += LANES) most = larger(most, load(scores + s));
        const float largest = largest_of(most);
        if (largest > top) {
            const float shrink = std::exp(top - largest);
            top = largest;
            mass *= shrink;
            for (float& sum : sums) sum *= shrink;
        }
        for (int64_t s = 0; s < SLOTS; s += LANES) {
            const Lanes weights = exp_of(load(scores + s) - top);
            store(scores + s, weights);
            mass += weights;
        }
    }
};

// scores[g * SLOTS + s] = query g . key s, for whole vectors of slots: what lies behind the last is left to the caller
template <int64_t V>
static void score(const float* query, const float* keys, float* scores, int64_t G, int64_t count) {
    constexpr int64_t D = V * LANES;
    for (int64_t s = 0; s < count; s += LANES)
        for (int64_t g = 0; g < G; ++g) {
            Lanes q[V], products[LANES];
            for (int64_t v = 0; v < V; ++v) q[v] = load(query + g * D + v * LANES);
#pragma GCC unroll 16  // or else the products do not stay in registers
            for (int64_t i = 0; i < LANES; ++i) {
                products[i] = q[0] * load(keys + (s + i) * D);
                for (int64_t v = 1; v < V; ++v) products[i] += q[v] * load(keys + (s + i) * D + v * LANES);
            }
            store(scores + g * SLOTS + s, sums_of(products));
        }
}

// partials[g].sums += weights[g * SLOTS + s] * value s, over all s and N query heads, whose sums stay in registers
template <int64_t V, int64_t N>
static void weigh(const float* weights, const float* values, Partial<V>* partials, int64_t count) {
    Lanes sums[N][V];
    for (int64_t g = 0; g < N; ++g) std::memcpy(sums[g], partials[g].sums, sizeof sums[g]);
    for (int64_t s = 0; s < count; ++s) {
        Lanes value[V];
        for (int64_t v = 0; v < V; ++v) value[v] = load(values + (s * V + v) * LANES);
        for (int64_t g = 0; g < N; ++g)
            for (int64_t v = 0; v < V; ++v) sums[g][v] += weights[g * SLOTS + s] * value[v];
    }
    for (int64_t g = 0; g < N; ++g) std::memcpy(partials[g].sums, sums[g], sizeof sums[g]);
}

template <int64_t V>
static void weigh_all(const float* weights, const float* values, Partial<V>* partials, int64_t G, int64_t count) {
    for (; G >= 3; G -= 3, weights += 3 * SLOTS, partials += 3) weigh<V, 3>(weights, values, partials, count);
    if (G == 2) weigh<V, 2>(weights, values, partials, count);
    if (G == 1) weigh<V, 1>(weights, values, partials, count);
}

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
        score<V>(scaled.data(), numbers, scores.data(), G, count);
        for (int64_t g = 0; g < G; ++g) partials[g].weights_of(scores.data() + g * SLOTS, count);
        read_values(values, b, h, first, count, numbers);
        weigh_all<V>(scores.data(), numbers, partials, G, count);
    }
}

// What `runs` tasks found for one query head, `stride` apart: its output (D) and the log-sum-exp of its scores.
template <int64_t V>
static float merge(const Partial<V>* partials, int64_t runs, int64_t stride, float* out) {
    float top = -INFINITY, mass = 0.f, sums[V * LANES] = {};
    for (int64_t run = 0; run < runs; ++run) top = std::max(top, partials[run * stride].top);
    for (int64_t run = 0; run < runs; ++run) {
        const Partial<V>& partial = partials[run * stride];
        const float weight = std::exp(partial.top - top);
        for (int64_t i = 0; i < LANES; ++i) mass += weight * partial.mass[i];
        for (int64_t d = 0; d < V * LANES; ++d) sums[d] += weight * partial.sums[d];
    }
    for (int64_t d = 0; d < V * LANES; ++d) out[d] = sums[d] / mass;
    return top + std::log(mass);
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
