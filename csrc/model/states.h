// States of recurrent layers, in slots: one holds those of all layers of a sequence, one after the other, in floats.
#pragma once
#include <vector>

#include "../base/memory.h"
#include "batch.h"
#include "plan.h"
#include "project.h"
#include "step.h"

namespace kvarn {

class StateStore {
public:
    void reserve(const std::vector<size_t>& floats, int num_slots);

    int num_slots() const { return num_slots_; }
    // Give the pages of a slot back to the system.
    void release(int slot) noexcept { region_.release_pages(static_cast<size_t>(slot) * slot_bytes_, slot_bytes_); }
    float* at(int slot, size_t layer) const {
        return reinterpret_cast<float*>(region_.data() + static_cast<size_t>(slot) * slot_bytes_ + offsets_[layer]);
    }

private:
    PageRegion region_;
    std::vector<size_t> offsets_;
    size_t slot_bytes_ = 0;
    int num_slots_ = 0;
};

// What a layer with a state makes of q, beta, decay and output_gate of the step: into mixed, quantised as `out`, whose
// values mixed is. Rows of a sequence are taken one after another, so that their cut into steps changes no bit.
void run_recurrent(const Compute& compute, const LayerPlan& layer, const StateStore& store, size_t index,
                   const BatchView& batch, const StepBuffers& buffers, const Activations& out);

}  // namespace kvarn
