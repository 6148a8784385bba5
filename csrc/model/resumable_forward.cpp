#include "resumable_forward.h"

#include <algorithm>
#include <chrono>

#include "../base/check.h"
#include "forward.h"

namespace kvarn {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPieceKeys = 1 << 16;  // rows x keys of one piece of attention, for each thread

// Enough work for every thread, and where the context is long no more than that.
size_t runs_per_piece(const ModelPlan& plan, const BatchView& batch, int num_threads) {
    int fewest_heads = batch.num_tokens;
    for (const LayerPlan& layer : plan.layers)
        if (layer.attention.exists()) fewest_heads = std::min(fewest_heads, layer.attention.num_groups());
    int context = *std::max_element(batch.context_lens, batch.context_lens + batch.num_sequences);
    int busy = (3 * num_threads + fewest_heads - 1) / fewest_heads;
    int short_enough = num_threads * kPieceKeys / context / kQueriesPerTask;
    return static_cast<size_t>(std::max({busy, short_enough, 1}));
}

}  // namespace

ResumableForward Model::begin(const BatchView& batch, std::span<const int32_t> output_rows) {
    check(batch, output_rows);
    require(batch.num_tokens > 0, "a resumable forward pass needs at least one token");
    std::lock_guard turn(pool_->turn());
    return {.batch = batch,
            .output_rows = output_rows,
            .buffers = prepare_step(resumable_arena_, batch),
            .runs_per_piece = runs_per_piece(plan_, batch, pool_->num_threads()),
            .times = {},
            .number = ++num_resumable_};
}

// Time that was granted and not used, less than a piece's, is used by a later call: on average none is lost.
bool Model::advance(ResumableForward& forward, double seconds, float* out) {
    require(forward.number == num_resumable_, "another resumable forward pass has begun since; this one is over");
    std::lock_guard turn(pool_->turn());
    double left = seconds + forward.unused_s;
    do {
        PieceTimes& times = forward.times_of(forward.next);
        Clock::time_point begin = Clock::now();
        run_piece(forward);
        times.add(std::chrono::duration<double>(Clock::now() - begin).count());
        left -= times.last_s;
    } while (forward.layer < plan_.layers.size() && left >= forward.times_of(forward.next).last_s);
    forward.unused_s = std::clamp(left, -forward.piece_s(), forward.piece_s());
    if (forward.layer < plan_.layers.size()) return false;
    write_outputs(forward.buffers, forward.output_rows, out);
    return true;
}

void Model::run_piece(ResumableForward& forward) {
    std::span<const QueryRun> runs = forward.buffers.runs;
    switch (forward.next) {
        case Piece::qkv:
            compute_qkv(forward.layer, forward.batch, forward.buffers);
            forward.next_run = 0;
            forward.next = plan_.layers[forward.layer].attention.exists() ? Piece::attend : Piece::finish;
            break;
        case Piece::attend: {
            size_t count = std::min(forward.runs_per_piece, runs.size() - forward.next_run);
            run_attention(forward.layer, forward.batch, forward.buffers, runs.subspan(forward.next_run, count));
            forward.next_run += count;
            if (forward.next_run == runs.size()) forward.next = Piece::finish;
            break;
        }
        case Piece::finish:
            finish_attention(forward.layer, forward.batch, forward.buffers);
            run_feed_forward(forward.layer, forward.batch, forward.buffers);
            finish_layer(forward.layer, forward.batch, forward.buffers);
            ++forward.layer;
            forward.next = Piece::qkv;
            break;
    }
}

}  // namespace kvarn
