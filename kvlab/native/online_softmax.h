// Softmax attention whose slots come a few at a time, and in runs that are merged.

#pragma once
#include <algorithm>
#include <cmath>

#include "lanes.h"

// Softmax attention of one query head over the slots so far: sums / mass, weights being relative to e^top.
template <int64_t V>
struct Partial {
    float top = -INFINITY;
    Lanes mass = {};  // in sixteen shares
    alignas(64) float sums[V * LANES] = {};

    // Turn the scores of `count` more slots into weights; what was summed before shrinks when a larger score comes.
    void weights_of(float* scores, int64_t count) {
        const int64_t filled = (count + LANES - 1) / LANES * LANES;  // whole vectors, which the scores have room for
        for (int64_t s = count; s < filled; ++s) scores[s] = -INFINITY;
        Lanes most = load(scores);
        for (int64_t s = LANES; s < filled; s += LANES) most = larger(most, load(scores + s));
        const float largest = largest_of(most);
        if (largest > top) {
            const float shrink = std::exp(top - largest);
            top = largest;
            mass *= shrink;
            for (float& sum : sums) sum *= shrink;
        }
        for (int64_t s = 0; s < filled; s += LANES) {
            const Lanes weights = exp_of(load(scores + s) - top);
            store(scores + s, weights);
            mass += weights;
        }
    }
};

// scores[g * room + s] = query g . key s, for whole vectors of slots: what lies behind the last is left to the caller
template <int64_t V>
static void score(const float* query, const float* keys, float* scores, int64_t room, int64_t G, int64_t count) {
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
            store(scores + g * room + s, sums_of(products));
        }
}

// partials[g].sums += weights[g * room + s] * value s, over all s and N query heads, whose sums stay in registers
template <int64_t V, int64_t N>
static void weigh(const float* weights, int64_t room, const float* values, Partial<V>* partials, int64_t count) {
    Lanes sums[N][V];
    for (int64_t g = 0; g < N; ++g) std::memcpy(sums[g], partials[g].sums, sizeof sums[g]);
    for (int64_t s = 0; s < count; ++s) {
        Lanes value[V];
        for (int64_t v = 0; v < V; ++v) value[v] = load(values + (s * V + v) * LANES);
        for (int64_t g = 0; g < N; ++g)
            for (int64_t v = 0; v < V; ++v) sums[g][v] += weights[g * room + s] * value[v];
    }
    for (int64_t g = 0; g < N; ++g) std::memcpy(partials[g].sums, sums[g], sizeof sums[g]);
}

template <int64_t V>
static void weigh_all(const float* weights, int64_t room, const float* values, Partial<V>* partials, int64_t G,
                      int64_t count) {
    for (; G >= 3; G -= 3, weights += 3 * room, partials += 3) weigh<V, 3>(weights, room, values, partials, count);
    if (G == 2) weigh<V, 2>(weights, room, values, partials, count);
    if (G == 1) weigh<V, 1>(weights, room, values, partials, count);
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
