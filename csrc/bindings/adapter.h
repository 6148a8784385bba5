// Adapters as Python sees them: opaque, made by a model, named by the rows of its batches.
#pragma once
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <string>
#include <vector>

#include "../model/forward.h"
#include "arrays.h"

namespace kvarn {

// One pair as it comes from Python: flat values of `type`, a (rank, columns) and b (rows, rank).
struct PairArrays {
    std::string name;
    int rows, columns, rank;
    float scale;
    In1<uint8_t> a, b;
};

// pairs: tuples of the fields above. Throws when one does not fit the model.
std::shared_ptr<Adapter> make_adapter(const Model& model, Type type, nb::sequence pairs);

// A tuple of tuples of AdapterUse: what each sequence, or row, uses; empty where none has any.
std::vector<AdapterUses> read_uses(nb::handle adapters, size_t count);

}  // namespace kvarn
