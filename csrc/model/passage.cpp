#include "passage.h"

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
    for (const LayerPlan& layer : plan.layers) fewest_heads = std::min(fewest_heads, layer.attention.num_kv_heads);
    int context = *std::max_element(batch.context_lens, batch.context_lens + batch.num_sequences);
    int busy = (3 * num_threads + fewest_heads - 1) / fewest_heads;
    int short_enough = num_threads * kPieceKeys / context / kQueriesPerTask;
    return static_cast<size_t>(std::max({busy, short_enough, 1}));
}

}  // namespace

Passage Model::begin(const BatchView& batch, std::span<const int32_t> output_rows) {
    check(batch, output_rows);
    require(batch.num_tokens > 0, "a passage needs at least one token");
    std::lock_guard turn(pool_->turn());
    return {.batch = batch,
            .output_rows = output_rows,
            .buffers = enter(passage_arena_, batch),
            .runs_per_piece = runs_per_piece(plan_, batch, pool_->num_threads()),
            .times = {},
            .number = ++num_passages_};
}

// Time that was granted and not used, less than a piece's, is used by a later call: on average none is lost.
bool Model::advance(Passage& passage, double seconds, float* out) {
    require(passage.number == num_passages_, "another passage has begun since; this one is over");
    std::lock_guard turn(pool_->turn());
    double left = seconds + passage.unused_s;
    do {
        PieceTimes& times = passage.times_of(passage.next);
        Clock::time_point begin = Clock::now();
        run_piece(passage);
        times.add(std::chrono::duration<double>(Clock::now() - begin).count());
        left -= times.last_s;
    } while (passage.layer < plan_.layers.size() && left >= passage.times_of(passage.next).last_s);
    passage.unused_s = std::clamp(left, -passage.piece_s(), passage.piece_s());
    if (passage.layer < plan_.layers.size()) return false;
    leave(passage.buffers, passage.output_rows, out);
    return true;
}

void Model::run_piece(Passage& passage) {
    std::span<const QueryRun> runs = passage.buffers.runs;
    switch (passage.next) {
        case Piece::open:
            open_attention(passage.layer, passage.batch, passage.buffers);
            passage.next_run = 0;
            passage.next = Piece::attend;
            break;
        case Piece::attend: {
            size_t count = std::min(passage.runs_per_piece, runs.size() - passage.next_run);
            run_attention(passage.layer, passage.batch, passage.buffers, runs.subspan(passage.next_run, count));
            passage.next_run += count;
            if (passage.next_run == runs.size()) passage.next = Piece::close;
            break;
        }
        case Piece::close:
            close_attention(passage.layer, passage.batch, passage.buffers);
            run_feed_forward(passage.layer, passage.batch, passage.buffers);
            ++passage.layer;
            passage.next = Piece::open;
            break;
    }
}

}  // namespace kvarn
