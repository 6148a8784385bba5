#include "batch.h"

#include "../base/check.h"

namespace kvarn {

namespace {

Keep read_keep(nb::handle keep) {
    const auto table = field<In1<int32_t>>(keep, "table");
    return {field<int>(keep, "sequence"),
            field<int>(keep, "block_start"),
            field<int>(keep, "block_end"),
            field<int>(keep, "num_kept"),
            {table.data(), table.data() + table.size()},
            field<bool>(keep, "per_head"),
            field<int>(keep, "pool_kernel")};
}

}  // namespace

Batch::Batch(nb::handle batch)
    : token_ids_(field<In1<int32_t>>(batch, "token_ids")), positions_(field<In1<int32_t>>(batch, "positions")),
      row_starts_(field<In1<int32_t>>(batch, "row_starts")), context_lens_(field<In1<int32_t>>(batch, "context_lens")),
      block_tables_(field<In2<int32_t>>(batch, "block_tables")),
      output_rows_(field<In1<int32_t>>(batch, "output_rows")) {
    if (nb::object tables = batch.attr("window_tables"); !tables.is_none())
        window_tables_ = nb::cast<In2<int32_t>>(tables);
    if (nb::object shifts = batch.attr("slot_shifts"); !shifts.is_none()) slot_shifts_ = nb::cast<In1<int32_t>>(shifts);
    for (nb::handle keep : batch.attr("keep")) keep_.push_back(read_keep(keep));
    if (nb::object states = batch.attr("states"); !states.is_none()) read_states(states);
    if (nb::object inputs = batch.attr("inputs"); !inputs.is_none()) inputs_ = nb::cast<In2<float>>(inputs);
    if (nb::object canvases = batch.attr("canvases"); !canvases.is_none()) read_canvases(canvases);
    size_t sequences = context_lens_.size();
    adapters_ = read_uses(batch.attr("adapters"), sequences);
    require(positions_.size() == token_ids_.size() && row_starts_.size() == sequences + 1 &&
                block_tables_.shape(0) == sequences && sequences > 0 &&
                (!window_tables_ ||
                 (window_tables_->shape(0) == sequences && window_tables_->shape(1) == block_tables_.shape(1))) &&
                (!inputs_ || inputs_->shape(0) == token_ids_.size()) &&
                (!canvas_starts_ || (canvas_starts_->size() == sequences && feedback_.size() == sequences)) &&
                (!slot_shifts_ || slot_shifts_->size() == sequences) &&
                (!state_read_ || (state_read_->size() == sequences && state_written_->size() == sequences)),
            "the arrays of the batch do not fit together");
}

void Batch::read_states(nb::handle states) {
    state_read_ = field<In1<int32_t>>(states, "read");
    state_written_ = field<In1<int32_t>>(states, "written");
    const auto rows = field<In1<int32_t>>(states, "saved_rows"), slots = field<In1<int32_t>>(states, "saved_slots");
    require(rows.size() == slots.size(), "every saved state needs a row and a slot");
    for (size_t i = 0; i < rows.size(); ++i) saved_states_.emplace_back(rows.data()[i], slots.data()[i]);
}

void Batch::read_canvases(nb::handle canvases) {
    canvas_starts_ = field<In1<int32_t>>(canvases, "starts");
    for (nb::handle one : canvases.attr("feedback"))
        feedback_.push_back(one.is_none() ? std::nullopt : std::optional(nb::cast<In2<float>>(one)));
}

BatchView Batch::view() const {
    std::vector<FeedbackView> feedback;
    for (const auto& one : feedback_)
        feedback.push_back(
            one ? FeedbackView{one->data(), static_cast<int>(one->shape(0)), static_cast<int>(one->shape(1))}
                : FeedbackView{});
    return {static_cast<int>(token_ids_.size()),
            static_cast<int>(context_lens_.size()),
            static_cast<int>(block_tables_.shape(1)),
            token_ids_.data(),
            positions_.data(),
            row_starts_.data(),
            context_lens_.data(),
            block_tables_.data(),
            window_tables_ ? window_tables_->data() : nullptr,
            slot_shifts_ ? slot_shifts_->data() : nullptr,
            keep_,
            state_read_ ? state_read_->data() : nullptr,
            state_written_ ? state_written_->data() : nullptr,
            saved_states_,
            adapters_,
            inputs_ ? inputs_->data() : nullptr,
            inputs_ ? static_cast<int>(inputs_->shape(1)) : 0,
            canvas_starts_ ? canvas_starts_->data() : nullptr,
            std::move(feedback)};
}

}  // namespace kvarn
