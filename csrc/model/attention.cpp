#include "attention.h"

#include <cmath>
#include <cstdlib>

#include "mla.h"
#include "running_softmax.h"

namespace kvarn {

namespace {

// Queries of a task whose keys are split. The state of latent attention is large: only single ones are.
int split_queries(const AttentionSpec& spec) { return spec.latent.exists() ? 1 : kQueriesPerTask; }

// A run of queries that meet one KV head.
struct Task {
    const QueryRun& run;
    int kv_head;

    int num_queries() const { return run.num_rows; }
    int row(int i) const { return run.row_begin + i; }
};

struct Range {
    int begin, end;
    bool operator==(const Range&) const = default;
};

class Attending {
public:
    Attending(const Compute& compute, const AttentionSpec& spec, const float* sinks, const KVCache& cache, size_t layer,
              const BatchView& batch, std::span<const QueryRun> runs, const float* q, float* out,
              const Activations& mixed, const AttentionScratch& scratch)
        : compute_(compute), spec_(spec), sinks_(sinks), cache_(cache), layer_(layer), batch_(batch), runs_(runs),
          q_(q), out_(out), mixed_(mixed), scratch_(scratch), attend_(attend_kernel(compute.kernels, cache.type())),
          group_(spec.group()) {}

    void run() const {
        run_tasks();
        if (spec_.latent.exists() || is_quantized_by_head()) return;
        int begin = runs_.front().row_begin, end = runs_.back().row_begin + runs_.back().num_rows;
        for_rows(compute_, end - begin, [&](int i) { mixed_.quantize(compute_.kernels, begin + i, 0, mixed_.k); });
    }

private:
    void run_tasks() const {
        int num_tasks = count_tasks();
        int num_splits = max_splits();
        bool is_narrow = spec_.window > 0 && spec_.window <= kSplitKeys;  // two splits at most have keys
        if (!is_narrow && num_splits > 1 &&
            num_tasks < AttentionScratch::max_split_tasks(compute_.pool.num_threads()) &&
            std::ranges::all_of(runs_, [&](const QueryRun& run) { return run.num_rows <= split_queries(spec_); }))
            return run_split(num_tasks, num_splits);
        compute_.pool.run(num_tasks, [&](int index, int worker) { whole(find_task(index), worker); });
    }

    // The query heads of one KV head fill whole quantisation blocks: who makes them quantises them.
    bool is_quantized_by_head() const { return !spec_.latent.exists() && group_ * spec_.head_dim % kQuantBlock == 0; }

    // Slots that query i of a task may look at. In one sequence a later row sees as far as an earlier one or further.
    Range visible(const Task& task, int i) const {
        int sequence = task.run.sequence_of(i), position = batch_.positions[task.row(i)];
        int shift = batch_.shift(sequence), context = batch_.context_lens[sequence], end = context;
        const bool is_canvas = spec_.mask == MaskKind::canvas && position >= batch_.canvas_start(sequence);
        if (is_canvas) position = batch_.canvas_start(sequence);  // all of it, and of the text what its first row sees
        else if (spec_.mask == MaskKind::causal || spec_.mask == MaskKind::canvas) end = position + 1 - shift;
        else if (spec_.mask == MaskKind::block_causal)
            end = std::min(context, (position / spec_.mask_block + 1) * spec_.mask_block - shift);
        else if (spec_.window > 0) end = std::min(context, position + spec_.window - shift);
        if (spec_.window == 0) return {0, end};
        int reach = spec_.is_chunked ? position % spec_.window : spec_.window - 1;
        return {std::max(0, position - reach - shift), end};
    }

    int count_tasks() const { return static_cast<int>(runs_.size()) * spec_.num_groups(); }

    int max_splits() const {
        int longest = *std::max_element(batch_.context_lens, batch_.context_lens + batch_.num_sequences);
        return (longest + kSplitKeys - 1) / kSplitKeys;
    }

    Task find_task(int index) const {
        return {runs_[static_cast<size_t>(index / spec_.num_groups())], index % spec_.num_groups()};
    }

    // Scratch of a worker: gathered queries | scores | state of one split | state of the whole | values of latents,
    // or what distances add to scores.
    int heads_of(const Task& task) const { return task.num_queries() * group_; }
    size_t query_floats() const { return static_cast<size_t>(kQueriesPerTask * group_ * spec_.head_dim); }
    float* scores_at(float* memory) const { return memory + query_floats(); }
    float* states_at(float* memory) const {
        return scores_at(memory) + static_cast<size_t>(kQueriesPerTask * group_ * kKeyTile);
    }
    uint8_t* values_at(float* memory) const {
        return reinterpret_cast<uint8_t*>(states_at(memory) +
                                          2 * State::floats(kQueriesPerTask * group_, spec_.head_dim));
    }

    void gather(const Task& task, float* queries) const {
        size_t span = static_cast<size_t>(group_ * spec_.head_dim);
        for (int i = 0; i < task.num_queries(); ++i) {
            const float* row =
                q_ + static_cast<size_t>(task.row(i)) * static_cast<size_t>(spec_.num_heads * spec_.head_dim);
            std::copy_n(row + static_cast<size_t>(task.kv_head) * span, span, queries + static_cast<size_t>(i) * span);
        }
    }

    void scatter(const Task& task, const State& state) const {
        int dim = spec_.value_dim(), width = group_ * dim, column = task.kv_head * width;
        for (int i = 0; i < task.num_queries(); ++i) {
            float* row = out_ + static_cast<size_t>(task.row(i)) * static_cast<size_t>(spec_.num_heads * dim) + column;
            for (int g = 0; g < group_; ++g) {
                int h = i * group_ + g;
                const float* acc = state.acc + static_cast<size_t>(h) * static_cast<size_t>(spec_.head_dim);
                auto [keep, total] = weigh_sink(state.m[h], state.l[h], task.kv_head * group_ + g);
                for (int d = 0; d < dim; ++d) row[g * dim + d] = acc[d] * keep / total;
            }
            if (is_quantized_by_head()) mixed_.quantize(compute_.kernels, task.row(i), column, column + width);
        }
    }

    // A sink is one more key with a score of its own and no value: what the sums shrink by, and the new total.
    std::pair<float, float> weigh_sink(float m, float l, int head) const {
        if (sinks_ == nullptr) return {1.0f, l};
        float top = std::max(m, sinks_[head]), keep = std::exp(m - top);
        return {keep, l * keep + std::exp(sinks_[head] - top)};
    }

    void whole(const Task& task, int worker) const {
        float* memory = scratch_.of_worker(worker);
        gather(task, memory);
        int heads = heads_of(task);
        State split = State::at(states_at(memory), heads, spec_.head_dim);
        State total = State::at(states_at(memory) + State::floats(heads, spec_.head_dim), heads, spec_.head_dim);
        total.clear();
        Range seen = visible(task, {0, task.num_queries()});
        for (int s = seen.begin / kSplitKeys; s * kSplitKeys < seen.end; ++s) {
            reduce_split(task, s, memory, split);
            merge(total, split);
        }
        scatter(task, total);
    }

    void run_split(int num_tasks, int num_splits) const {
        size_t floats = State::floats(split_queries(spec_) * group_, spec_.head_dim);
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

    // From the first key that one of the queries sees to the last.
    Range visible(const Task& task, Range queries) const {
        Range all = visible(task, queries.begin);
        for (int i = queries.begin + 1; i < queries.end; ++i) {
            Range one = visible(task, i);
            all = {std::min(all.begin, one.begin), std::max(all.end, one.end)};
        }
        return all;
    }

    // What all queries have in common goes through the kernel together, the rest of each sequence alone.
    void reduce_split(const Task& task, int split, float* memory, const State& state) const {
        state.clear();
        int begin = split * kSplitKeys, end = begin + kSplitKeys;
        if (task.run.shared_keys == 0) return reduce_keys(task, {begin, end}, {0, task.num_queries()}, memory, state);
        // What one sequence has freed before its window, another may still see.
        int shared_keys = cache_.is_windowed() ? 0 : task.run.shared_keys;
        reduce_keys(task, {begin, std::min(end, shared_keys)}, {0, task.num_queries()}, memory, state);
        for (int i = 0; i < task.num_queries(); ++i)
            reduce_keys(task, {std::max(begin, shared_keys), end}, {i, i + 1}, memory, state);
    }

    // The tiles of `keys` that the queries see, in a cache where all of these have them in the same blocks.
    void reduce_keys(const Task& task, Range keys, Range queries, float* memory, const State& state) const {
        Range seen = visible(task, queries);
        int begin = std::max(keys.begin, seen.begin / kKeyTile * kKeyTile), end = std::min(keys.end, seen.end);
        for (int key = begin; key < end; key += kKeyTile) reduce_tile(task, key, queries, memory, state);
    }

    // Neighbouring queries that see the same keys of the tile go through the kernel together.
    void reduce_tile(const Task& task, int key, Range queries, float* memory, const State& state) const {
        KVTile tile = load_tile(task, task.run.sequence_of(queries.begin), key, values_at(memory));
        auto clipped = [&](int i) {
            Range range = visible(task, i);
            return Range{std::max(range.begin - key, 0), std::min(range.end - key, kKeyTile)};
        };
        for (int i = queries.begin; i < queries.end;) {
            Range range = clipped(i);
            int j = i + 1;
            while (j < queries.end && clipped(j) == range) ++j;
            if (range.begin < range.end) reduce_heads(task, tile, key, range, {i, j}, memory, state);
            i = j;
        }
    }

    void reduce_heads(const Task& task, const KVTile& tile, int key, Range range, Range queries, float* memory,
                      const State& state) const {
        int head = queries.begin * group_, count = (queries.end - queries.begin) * group_;
        size_t offset = static_cast<size_t>(head) * static_cast<size_t>(spec_.head_dim);
        const float* bias = spec_.alibi.empty() ? nullptr : distances(task, key, queries, memory);
        attend_(memory + offset, count, spec_.head_dim, tile, range.begin, range.end, spec_.scale, spec_.softcap, bias,
                state.m + head, state.l + head, state.acc + offset, scores_at(memory));
    }

    // What the distance between query and key takes from the scores of a tile, by head.
    const float* distances(const Task& task, int key, Range queries, float* memory) const {
        float *first = reinterpret_cast<float*>(values_at(memory)), *out = first;
        for (int i = queries.begin; i < queries.end; ++i) {
            int offset = batch_.positions[task.row(i)] - batch_.shift(task.run.sequence_of(i)) - key;
            for (int g = 0; g < group_; ++g, out += kKeyTile) {
                float slope = spec_.alibi[static_cast<size_t>(task.kv_head * group_ + g)];
                for (int k = 0; k < kKeyTile; ++k) out[k] = -slope * static_cast<float>(std::abs(offset - k));
            }
        }
        return first;
    }

    KVTile load_tile(const Task& task, int sequence, int key, uint8_t* values) const {
        KVTile tile{};
        tile.num_keys = std::min(kKeyTile, batch_.context_lens[sequence] - key);
        const int32_t* blocks = batch_.blocks(sequence, cache_.is_windowed());
        for (int b = 0; b * kKVBlock < tile.num_keys; ++b) {
            int block = blocks[key / kKVBlock + b];
            tile.k[b] = cache_.k(block, layer_, spec_.cached_head(task.kv_head));
            if (!spec_.latent.exists()) tile.v[b] = cache_.v(block, layer_, task.kv_head);
        }
        if (spec_.latent.exists()) turn_latents(cache_.type(), spec_.head_dim, tile, values);
        return tile;
    }

    const Compute& compute_;
    const AttentionSpec& spec_;
    const float* sinks_;
    const KVCache& cache_;
    size_t layer_;
    const BatchView& batch_;
    std::span<const QueryRun> runs_;
    const float* q_;
    float* out_;
    const Activations& mixed_;
    const AttentionScratch& scratch_;
    AttendFn attend_;
    int group_;
};

size_t worker_floats(const AttentionSpec& spec) {
    int heads = kQueriesPerTask * spec.group();
    size_t floats = static_cast<size_t>(heads) * static_cast<size_t>(spec.head_dim + kKeyTile) +
                    2 * State::floats(heads, spec.head_dim) +
                    static_cast<size_t>(spec.latent.exists() ? kKeyTile * spec.head_dim : 0) +
                    static_cast<size_t>(spec.alibi.empty() ? 0 : heads * kKeyTile);
    return (floats + 15) / 16 * 16;
}

size_t partial_floats(const AttentionSpec& spec, int num_threads, int max_context) {
    int heads = split_queries(spec) * spec.group();
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

void attend(const Compute& compute, const AttentionSpec& spec, const float* sinks, const KVCache& cache, size_t layer,
            const BatchView& batch, std::span<const QueryRun> runs, const float* q, float* out,
            const Activations& mixed, const AttentionScratch& scratch) {
    Attending(compute, spec, sinks, cache, layer, batch, runs, q, out, mixed, scratch).run();
}

}  // namespace kvarn
