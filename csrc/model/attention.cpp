#include "attention.h"

#include <cmath>
#include <limits>

namespace kvarn {

namespace {

// Running softmax of `heads` query heads: maxima, sums, accumulators, in one run of floats.
struct State {
    float* m;
    float* l;
    float* acc;
    int heads, head_dim;

    static size_t floats(int heads, int head_dim) {
        return static_cast<size_t>(heads) * static_cast<size_t>(head_dim + 2);
    }
    static State at(float* memory, int heads, int head_dim) {
        return {memory, memory + heads, memory + 2 * heads, heads, head_dim};
    }
    void clear() const {
        std::fill(m, m + heads, -std::numeric_limits<float>::infinity());
        std::fill(l, l + heads, 0.0f);
        std::fill(acc, acc + static_cast<size_t>(heads) * static_cast<size_t>(head_dim), 0.0f);
    }
};

// Merge a later split into an earlier one. Merging into a cleared state copies it exactly.
void merge(const State& into, const State& from) {
    for (int h = 0; h < into.heads; ++h) {
        if (from.l[h] == 0.0f) continue;
        float m = std::max(into.m[h], from.m[h]);
        float keep = into.l[h] == 0.0f ? 0.0f : std::exp(into.m[h] - m);
        float take = std::exp(from.m[h] - m);
        float* a = into.acc + static_cast<size_t>(h) * static_cast<size_t>(into.head_dim);
        const float* b = from.acc + static_cast<size_t>(h) * static_cast<size_t>(into.head_dim);
        for (int d = 0; d < into.head_dim; ++d) a[d] = a[d] * keep + b[d] * take;
        into.l[h] = into.l[h] * keep + from.l[h] * take;
        into.m[h] = m;
    }
}

// A run of queries of one sequence that meet one KV head.
struct Task {
    int sequence, kv_head, row_begin, num_queries;
};

struct Range {
    int begin, end;
    bool operator==(const Range&) const = default;
};

class Attending {
public:
    Attending(const Compute& compute, const AttentionSpec& spec, const KVCache& cache, size_t layer,
              const BatchView& batch, const float* q, float* out, const AttentionScratch& scratch)
        : compute_(compute), spec_(spec), cache_(cache), layer_(layer), batch_(batch), q_(q), out_(out),
          scratch_(scratch), attend_(attend_kernel(compute.kernels, cache.type())),
          group_(spec.num_heads / spec.num_kv_heads) {}

    void run() const {
        int num_tasks = count_tasks();
        int num_splits = max_splits();
        if (num_splits > 1 && num_tasks < AttentionScratch::max_split_tasks(compute_.pool.num_threads()))
            return run_split(num_tasks, num_splits);
        compute_.pool.run(num_tasks, [&](int index, int worker) { whole(find_task(index), worker); });
    }

private:
    // Slots a row may look at. With every mask a later row sees as far as an earlier one or further.
    Range visible(int sequence, int row) const {
        int position = batch_.positions[row], shift = batch_.shift(sequence), context = batch_.context_lens[sequence];
        int end = context;
        if (spec_.mask == MaskKind::causal) end = position + 1 - shift;
        else if (spec_.mask == MaskKind::block_causal)
            end = std::min(context, (position / spec_.mask_block + 1) * spec_.mask_block - shift);
        int begin = spec_.window > 0 ? std::max(0, position + 1 - spec_.window - shift) : 0;
        return {begin, end};
    }

    int queries(int sequence) const { return batch_.row_starts[sequence + 1] - batch_.row_starts[sequence]; }
    int tasks_of(int sequence) const {
        return (queries(sequence) + kQueriesPerTask - 1) / kQueriesPerTask * spec_.num_kv_heads;
    }

    int count_tasks() const {
        int count = 0;
        for (int s = 0; s < batch_.num_sequences; ++s) count += tasks_of(s);
        return count;
    }

    int max_splits() const {
        int longest = *std::max_element(batch_.context_lens, batch_.context_lens + batch_.num_sequences);
        return (longest + kSplitKeys - 1) / kSplitKeys;
    }

    Task find_task(int index) const {
        int s = 0;
        for (; index >= tasks_of(s); ++s) index -= tasks_of(s);
        int first = index / spec_.num_kv_heads * kQueriesPerTask;
        return {s, index % spec_.num_kv_heads, batch_.row_starts[s] + first,
                std::min(kQueriesPerTask, queries(s) - first)};
    }

    // Scratch of a worker: gathered queries | scores | state of one split | state of the whole.
    int heads_of(const Task& task) const { return task.num_queries * group_; }
    size_t query_floats() const { return static_cast<size_t>(kQueriesPerTask * group_ * spec_.head_dim); }
    float* scores_at(float* memory) const { return memory + query_floats(); }
    float* states_at(float* memory) const {
        return scores_at(memory) + static_cast<size_t>(kQueriesPerTask * group_ * kKeyTile);
    }

    void gather(const Task& task, float* queries) const {
        size_t span = static_cast<size_t>(group_ * spec_.head_dim);
        for (int i = 0; i < task.num_queries; ++i) {
            const float* row =
                q_ + static_cast<size_t>(task.row_begin + i) * static_cast<size_t>(spec_.num_heads * spec_.head_dim);
            std::copy_n(row + static_cast<size_t>(task.kv_head) * span, span, queries + static_cast<size_t>(i) * span);
        }
    }

    void scatter(const Task& task, const State& state) const {
        for (int i = 0; i < task.num_queries; ++i) {
            float* row =
                out_ + static_cast<size_t>(task.row_begin + i) * static_cast<size_t>(spec_.num_heads * spec_.head_dim) +
                static_cast<size_t>(task.kv_head * group_ * spec_.head_dim);
            for (int g = 0; g < group_; ++g) {
                int h = i * group_ + g;
                const float* acc = state.acc + static_cast<size_t>(h) * static_cast<size_t>(spec_.head_dim);
                for (int d = 0; d < spec_.head_dim; ++d) row[g * spec_.head_dim + d] = acc[d] / state.l[h];
            }
        }
    }

    void whole(const Task& task, int worker) const {
        float* memory = scratch_.of_worker(worker);
        gather(task, memory);
        int heads = heads_of(task);
        State split = State::at(states_at(memory), heads, spec_.head_dim);
        State total = State::at(states_at(memory) + State::floats(heads, spec_.head_dim), heads, spec_.head_dim);
        total.clear();
        int splits = (visible(task.sequence, task.row_begin + task.num_queries - 1).end + kSplitKeys - 1) / kSplitKeys;
        for (int s = 0; s < splits; ++s) {
            reduce_split(task, s, memory, split);
            merge(total, split);
        }
        scatter(task, total);
    }

    void run_split(int num_tasks, int num_splits) const {
        size_t floats = State::floats(kQueriesPerTask * group_, spec_.head_dim);
        auto partial = [&](const Task& task, int unit) {
            return State::at(scratch_.partials() + static_cast<size_t>(unit) * floats, heads_of(task), spec_.head_dim);
        };
        compute_.pool.run(num_tasks * num_splits, [&](int unit, int worker) {
            Task task = find_task(unit / num_splits);
            float* memory = scratch_.of_worker(worker);
            gather(task, memory);
            reduce_split(task, unit % num_splits, memory, partial(task, unit));
        });
        compute_.pool.run(num_tasks, [&](int index, int worker) {
            Task task = find_task(index);
            State total = State::at(states_at(scratch_.of_worker(worker)), heads_of(task), spec_.head_dim);
            total.clear();
            for (int s = 0; s < num_splits; ++s) merge(total, partial(task, index * num_splits + s));
            scatter(task, total);
        });
    }

    void reduce_split(const Task& task, int split, float* memory, const State& state) const {
        state.clear();
        Range first = visible(task.sequence, task.row_begin);
        Range last = visible(task.sequence, task.row_begin + task.num_queries - 1);
        int begin = std::max(split * kSplitKeys, first.begin / kKeyTile * kKeyTile);
        int end = std::min((split + 1) * kSplitKeys, last.end);
        for (int key = begin; key < end; key += kKeyTile) reduce_tile(task, key, memory, state);
    }

    // Neighbouring queries that see the same keys of the tile go through the kernel together.
    void reduce_tile(const Task& task, int key, float* memory, const State& state) const {
        KVTile tile = load_tile(task, key);
        auto clipped = [&](int i) {
            Range range = visible(task.sequence, task.row_begin + i);
            return Range{std::max(range.begin - key, 0), std::min(range.end - key, kKeyTile)};
        };
        for (int i = 0; i < task.num_queries;) {
            Range range = clipped(i);
            int j = i + 1;
            while (j < task.num_queries && clipped(j) == range) ++j;
            if (range.begin < range.end) reduce_heads(tile, range, i * group_, (j - i) * group_, memory, state);
            i = j;
        }
    }

    void reduce_heads(const KVTile& tile, Range range, int head, int count, float* memory, const State& state) const {
        size_t offset = static_cast<size_t>(head) * static_cast<size_t>(spec_.head_dim);
        attend_(memory + offset, count, spec_.head_dim, tile, range.begin, range.end, spec_.scale, spec_.softcap,
                state.m + head, state.l + head, state.acc + offset, scores_at(memory));
    }

    KVTile load_tile(const Task& task, int key) const {
        KVTile tile{};
        tile.num_keys = std::min(kKeyTile, batch_.context_lens[task.sequence] - key);
        const int32_t* blocks = batch_.blocks(task.sequence);
        for (int b = 0; b * kKVBlock < tile.num_keys; ++b) {
            int block = blocks[key / kKVBlock + b];
            tile.k[b] = cache_.k(block, layer_, task.kv_head);
            tile.v[b] = cache_.v(block, layer_, task.kv_head);
        }
        return tile;
    }

    const Compute& compute_;
    const AttentionSpec& spec_;
    const KVCache& cache_;
    size_t layer_;
    const BatchView& batch_;
    const float* q_;
    float* out_;
    const AttentionScratch& scratch_;
    AttendFn attend_;
    int group_;
};

size_t worker_floats(const AttentionSpec& spec) {
    int heads = kQueriesPerTask * (spec.num_heads / spec.num_kv_heads);
    size_t floats = static_cast<size_t>(heads) * static_cast<size_t>(spec.head_dim + kKeyTile) +
                    2 * State::floats(heads, spec.head_dim);
    return (floats + 15) / 16 * 16;
}

size_t partial_floats(const AttentionSpec& spec, int num_threads, int max_context) {
    int heads = kQueriesPerTask * (spec.num_heads / spec.num_kv_heads);
    size_t splits = static_cast<size_t>((max_context + kSplitKeys - 1) / kSplitKeys);
    return static_cast<size_t>(AttentionScratch::max_split_tasks(num_threads)) * splits *
           State::floats(heads, spec.head_dim);
}

}  // namespace

size_t AttentionScratch::arena_bytes(const AttentionSpec& spec, int num_threads, int max_context) {
    return Arena::padded(worker_floats(spec) * static_cast<size_t>(num_threads) * sizeof(float)) +
           Arena::padded(partial_floats(spec, num_threads, max_context) * sizeof(float));
}

AttentionScratch AttentionScratch::take(Arena& arena, const AttentionSpec& spec, int num_threads, int max_context) {
    AttentionScratch scratch;
    scratch.worker_floats_ = worker_floats(spec);
    scratch.per_worker_ = arena.take<float>(scratch.worker_floats_ * static_cast<size_t>(num_threads));
    scratch.partials_ = arena.take<float>(partial_floats(spec, num_threads, max_context));
    return scratch;
}

void attend(const Compute& compute, const AttentionSpec& spec, const KVCache& cache, size_t layer,
            const BatchView& batch, const float* q, float* out, const AttentionScratch& scratch) {
    Attending(compute, spec, cache, layer, batch, q, out, scratch).run();
}

}  // namespace kvarn
