// What a batch must be before the layers see it: nothing in it reads or writes outside the model's memory.
#include <algorithm>

#include "../base/check.h"
#include "forward.h"

namespace kvarn {

void Model::check(const BatchView& batch, std::span<const int32_t> output_rows) const {
    require(batch.row_starts[0] == 0 && batch.row_starts[batch.num_sequences] == batch.num_tokens,
            "row_starts must run from 0 to the number of tokens");
    require(batch.input_width == plan_.joined_width(), "the inputs of the batch are not those that the model reads");
    for (int i = 0; i < batch.num_tokens; ++i) {
        require(batch.token_ids[i] >= 0 && batch.token_ids[i] < spec_.vocab_size,
                [&] { return "token id " + std::to_string(batch.token_ids[i]) + " is outside the vocabulary"; });
        require(batch.positions[i] >= 0 && (spec_.num_positions == 0 || batch.positions[i] < spec_.num_positions),
                [&] { return "position " + std::to_string(batch.positions[i]) + " is outside the model's range"; });
    }
    for (int s = 0; s < batch.num_sequences; ++s) check_sequence(batch, s);
    for (const Keep& keep : batch.keep) check_keep(batch, keep);
    if (plan_.max_channels > 0) check_states(batch);
    if (batch.canvas_starts != nullptr) check_canvases(batch);
    for (const AdapterUses& uses : batch.adapters)
        for (const AdapterUse& use : uses)
            require(use.adapter->base() == &weights_, "an adapter of another model is named");
    for (int32_t row : output_rows) require(row >= 0 && row < batch.num_tokens, "an output row is outside the batch");
}

void Model::check_sequence(const BatchView& batch, int s) const {
    int begin = batch.row_starts[s], end = batch.row_starts[s + 1];
    require(0 <= begin && begin < end && end <= batch.num_tokens, "row_starts must rise and stay within the batch");
    for (int row = begin + 1; row < end; ++row)
        require(batch.positions[row] == batch.positions[row - 1] + 1, "positions of a sequence must be consecutive");
    int context = batch.context_lens[s];
    int64_t shift = batch.shift(s);
    require(batch.positions[begin] >= shift, "slot_shifts must not exceed the positions of a sequence");
    require(context > batch.positions[end - 1] - shift, "context_lens must cover the batch's own tokens");
    require(context <= int64_t{batch.table_width} * kKVBlock, "the block table is shorter than the context");
    int blocks = (context - 1) / kKVBlock + 1;
    for (int b = 0; b < blocks; ++b) cache_.check_block(batch.blocks(s)[b]);
    if (!windowed_.empty()) check_window(batch, s);
}

// From the tile on in which the first row's window begins.
void Model::check_window(const BatchView& batch, int s) const {
    require(batch.window_tables != nullptr, "the cache has windows, the batch has no window_tables");
    int first = batch.positions[batch.row_starts[s]] + 1 - widest_window_ - batch.shift(s);
    int begin = std::max(0, first) / kKeyTile * kKeyTile / kKVBlock, end = (batch.context_lens[s] - 1) / kKVBlock + 1;
    for (int b = begin; b < end; ++b) window_cache_.check_block(batch.blocks(s, true)[b]);
}

void Model::check_states(const BatchView& batch) const {
    const auto has = [&](int slot) { return slot >= 0 && slot < states_.num_slots(); };
    for (int s = 0; s < batch.num_sequences; ++s) {
        const bool is_first = batch.positions[batch.row_starts[s]] == 0;
        if (batch.state_written == nullptr) {
            require(is_first, "a sequence without a state is computed in one piece");
            continue;
        }
        const int read = batch.state_read[s], written = batch.state_written[s];
        require(has(written) && (read == -1 || (has(read) && read != written)), "a state's slot is outside the store");
        require(is_first == (read == -1), "a sequence begins with zeros at position 0, and nowhere else");
    }
    int last = -1;
    for (auto [row, slot] : batch.saved_states) {
        require(row > last && row < batch.num_tokens && has(slot), "a saved state's row or slot is out of range");
        last = row;
    }
}

void Model::check_canvases(const BatchView& batch) const {
    require(plan_.canvas != nullptr, "the model has no canvases");
    for (int s = 0; s < batch.num_sequences; ++s) {
        const FeedbackView& one = batch.feedback[static_cast<size_t>(s)];
        const int rows = batch.row_starts[s + 1] - batch.first_canvas_row(s);
        require(one.values == nullptr || (one.rows == rows && one.width == spec_.width),
                "what is fed back does not fit its canvas");
    }
}

void Model::check_keep(const BatchView& batch, const Keep& keep) const {
    require(keep.sequence >= 0 && keep.sequence < batch.num_sequences, "keep names a sequence that is not there");
    int first = batch.row_starts[keep.sequence], last = batch.row_starts[keep.sequence + 1] - 1;
    int context = batch.context_lens[keep.sequence];
    require(batch.shift(keep.sequence) == 0, "what a sequence keeps is chosen in a step without a shift");
    require(keep.block_start < keep.block_end && keep.block_start >= batch.positions[first] &&
                keep.block_end <= batch.positions[last] + 1,
            "keep's block must be computed in the same step");
    require(keep.num_kept >= 0 && keep.num_kept <= context - (keep.block_end - keep.block_start),
            "keep's num_kept is more than the keys outside its block");
    require(keep.pool_kernel > 0 && keep.pool_kernel % 2 == 1, "keep's pool_kernel must be odd");
    require(static_cast<size_t>(keep.num_kept) <= keep.table.size() * kKVBlock,
            "keep's table is shorter than what it keeps");
    const int32_t* own = batch.blocks(keep.sequence);
    for (int block : keep.table) {
        cache_.check_block(block);
        require(std::find(own, own + (context - 1) / kKVBlock + 1, block) == own + (context - 1) / kKVBlock + 1,
                "keep's table must not hold blocks of the sequence itself");
    }
}

}  // namespace kvarn
