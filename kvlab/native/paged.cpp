// Attention of one query token in each of R requests over pools of blocks, read where they lie.
//
// A pool is (blocks, H_kv, block_size, D). The token at position p of a request lies in block table[p / block_size],
// at offset p % block_size. What a query sees is cut into runs, and each run is one task, so that requests of any
// lengths share the cores. A task reads all heads of a few slots before it goes on, because the heads of a block lie
// together; all else is as in decode.cpp.

#include <algorithm>
#include <vector>

#include "online_softmax.h"
#include "rows.h"

constexpr int64_t SCORED = 256;  // slots whose scores are kept until their values are read
constexpr int64_t ROOM = SCORED + LANES;  // scores come LANES at a time, wherever they begin

struct Requests {
    const int32_t* tables;   // (R, width)
    const int64_t* lengths;  // tokens stored; the query is the last of them
    int64_t R, width, block_size, window, sinks;  // window 0: a query sees everything
};

// The slots that a request's query sees: the sinks, and all from `start` on.
struct Visible {
    int64_t sinks, start, count;
    Visible(const Requests& requests, int64_t row) {
        const int64_t length = requests.lengths[row];
        start = requests.window ? std::max<int64_t>(0, length - requests.window) : 0;
        sinks = std::min(requests.sinks, start);
        count = sinks + length - start;
    }
    int64_t position(int64_t i) const { return i < sinks ? i : start + i - sinks; }
};

struct Task {
    int64_t row, first, end;  // the first-th slot that the row's query sees, up to the end-th
};
struct Piece {
    int64_t block, offset, count;  // slots that follow each other in a block
};

// Where the slots first .. first + count that a query sees lie, in the order of memory: attention does not mind the
// order of slots, and memory that is read upwards comes sooner. No piece has more than LANES slots.
static std::vector<Piece> locate(const Requests& requests, int64_t row, int64_t first, int64_t count) {
    const Visible visible(requests, row);
    const int64_t size = requests.block_size;
    std::vector<Piece> pieces;
    for (int64_t i = first, next; i < first + count; i = next) {
        const int64_t position = visible.position(i), offset = position % size;
        next = std::min({first + count, i + size - offset, i + LANES});
        if (i < visible.sinks) next = std::min(next, visible.sinks);
        pieces.push_back({requests.tables[row * requests.width + position / size], offset, next - i});
    }
    std::sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) {
        return x.block != y.block ? x.block < y.block : x.offset < y.offset;
    });
    return pieces;
}

// Calls f(first piece, last piece, slots before, slots) for as many whole pieces as have LANES slots at most. With
// blocks of LANES tokens or more that is never slots of two blocks, which lie apart.
template <typename F>
static void in_turn(const std::vector<Piece>& pieces, F f) {
    const Piece *piece = pieces.data(), *end = piece + pieces.size();
    for (int64_t before = 0, count; piece != end; before += count) {
        const Piece* first = piece;
        for (count = 0; piece != end && count + piece->count <= LANES; ++piece) count += piece->count;
        f(first, piece, before, count);
    }
}

// A pool as a task reads it.
template <int64_t V>
struct Source {
    const Rows& pool;
    const Reader reader = reader_of<V>(pool);
    const int64_t row_bytes = pool.width * (pool.kind == FP32 ? 32 : pool.kind == BF16 ? 16 : pool.bits) / 8;

    void read(const Piece* piece, const Piece* end, int64_t h, float* out) const {
        for (; piece != end; out += piece++->count * V * LANES)
            reader(pool, piece->block, h, piece->offset, piece->count, out);
    }

    // A processor foresees that reading goes on; that it goes on in another block it has to be told.
    void ask_for(const Piece& piece, int64_t h) const {
        const uint8_t* at = pool.data + piece.block * pool.data_b + h * pool.data_h + piece.offset * row_bytes;
        for (int64_t line = 0; line < piece.count * row_bytes; line += 64) __builtin_prefetch(at + line);
    }
};

// Scores some slots of all heads, then reads their values: the heads of a block lie together.
template <int64_t V>
static void attend_task(const float* queries, const Rows& keys, const Rows& values, const Requests& requests,
                        const Task& task, Partial<V>* partials, int64_t H_kv, int64_t G) {
    const Source<V> key_source{keys}, value_source{values};
    std::vector<float> scores(H_kv * G * ROOM);
    alignas(64) float numbers[LANES * V * LANES] = {};
    const int64_t size = requests.block_size, at_once = size < SCORED ? SCORED / size * size : SCORED;  // whole blocks
    for (int64_t first = task.first; first < task.end; first += at_once) {
        const int64_t count = std::min(at_once, task.end - first);
        const std::vector<Piece> pieces = locate(requests, task.row, first, count);
        const Piece* last = &pieces.back();
        in_turn(pieces, [&](const Piece* piece, const Piece* end, int64_t s, int64_t some) {
            for (int64_t h = 0; h < H_kv; ++h) {
                key_source.read(piece, end, h, numbers);
                if (end <= last && end->block > end[-1].block + 1) key_source.ask_for(*end, h);
                score<V>(queries + h * G * V * LANES, numbers, &scores[h * G * ROOM + s], ROOM, G, some);
            }
        });
        for (int64_t h = 0; h < H_kv * G; ++h) partials[h].weights_of(&scores[h * ROOM], count);
        in_turn(pieces, [&](const Piece* piece, const Piece* end, int64_t s, int64_t some) {
            for (int64_t h = 0; h < H_kv; ++h) {
                value_source.read(piece, end, h, numbers);
                if (end <= last && end->block > end[-1].block + 1) value_source.ask_for(*end, h);
                weigh_all<V>(&scores[h * G * ROOM + s], ROOM, numbers, partials + h * G, G, some);
            }
        });
    }
}

static std::vector<Task> cut(const Requests& requests, int64_t threads) {
    int64_t total = 0;
    for (int64_t row = 0; row < requests.R; ++row) total += Visible(requests, row).count;
    int64_t length = std::max<int64_t>(total / (4 * threads), 64);  // enough tasks to share out evenly
    length += requests.block_size - 1 - (length - 1) % requests.block_size;
    std::vector<Task> tasks;
    for (int64_t row = 0; row < requests.R; ++row)
        for (int64_t first = 0, count = Visible(requests, row).count; first < count; first += length)
            tasks.push_back({row, first, std::min(first + length, count)});
    return tasks;
}

template <int64_t V>
static void attend(const float* queries, const Rows& keys, const Rows& values, const Requests& requests, float* out,
                   float* lse, int64_t H_kv, int64_t G, float scale, int64_t threads) {
    const int64_t H = H_kv * G, D = V * LANES;
    const std::vector<Task> tasks = cut(requests, threads);
    const int64_t count = tasks.size();
    std::vector<Partial<V>> partials(count * H);
    std::vector<float> scaled(queries, queries + requests.R * H * D);
    for (float& x : scaled) x *= scale;

#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t t = 0; t < count; ++t)
        attend_task<V>(scaled.data() + tasks[t].row * H * D, keys, values, requests, tasks[t], partials.data() + t * H,
                       H_kv, G);

    for (int64_t first = 0, last; first < count; first = last) {  // the tasks of one request
        const int64_t row = tasks[first].row;
        for (last = first; last < count && tasks[last].row == row;) ++last;
        for (int64_t h = 0; h < H; ++h)
            lse[row * H + h] =
                merge<V>(partials.data() + first * H + h, last - first, H, out + (row * H + h) * D);
    }
}

// The first request whose table names no block of the pool somewhere its query looks; -1: all are in order.
static int64_t misplaced(const Requests& requests, int64_t blocks) {
    for (int64_t row = 0; row < requests.R; ++row) {
        const int64_t length = requests.lengths[row], last = (length + requests.block_size - 1) / requests.block_size;
        if (length < 1 || last > requests.width) return row;
        const Visible visible(requests, row);
        for (int64_t i = 0; i < last; ++i) {
            const int64_t block = requests.tables[row * requests.width + i];
            const bool looked_at = (i + 1) * requests.block_size > visible.start || i * requests.block_size < visible.sinks;
            if (looked_at && (block < 0 || block >= blocks)) return row;
        }
    }
    return -1;
}

// queries (R, H_kv, G, D) and out alike, lse (R, H_kv, G). Returns what `misplaced` does, and then nothing else is done.
extern "C" int64_t decode_paged(const float* queries, const Rows* keys, const Rows* values, const int32_t* tables,
                                const int64_t* lengths, float* out, float* lse, int64_t R, int64_t H_kv, int64_t G,
                                int64_t blocks, int64_t block_size, int64_t width, int64_t window, int64_t sinks,
                                float scale, int64_t threads) {
    const Requests requests = {tables, lengths, R, width, block_size, window, sinks};
    const int64_t wrong = misplaced(requests, blocks);
    if (wrong >= 0) return wrong;
    if (keys->width == 64) attend<4>(queries, *keys, *values, requests, out, lse, H_kv, G, scale, threads);
    if (keys->width == 128) attend<8>(queries, *keys, *values, requests, out, lse, H_kv, G, scale, threads);
    return wrong;
}
