#include "adapter.h"

#include <nanobind/stl/string.h>

#include "../base/check.h"
#include "released_gil.h"

namespace kvarn {

namespace {

constexpr int kMaxRank = 1024;

PairArrays read_pair(nb::handle pair) {
    auto item = [&](int i) { return pair[i]; };
    return {nb::cast<std::string>(item(0)), nb::cast<int>(item(1)),   nb::cast<int>(item(2)),
            nb::cast<int>(item(3)),         nb::cast<float>(item(4)), nb::cast<In1<uint8_t>>(item(5)),
            nb::cast<In1<uint8_t>>(item(6))};
}

// The embedding's a has a row for every token, as its table has.
int rows_of_a(const PairArrays& pair) { return pair.name == "token_embd" ? pair.columns : pair.rank; }
int columns_of_a(const PairArrays& pair) { return pair.name == "token_embd" ? pair.rank : pair.columns; }

void add_pair(const Model& model, Adapter& adapter, Type type, const PairArrays& pair) {
    LowRankPair packed{adapter.pack(type, rows_of_a(pair), columns_of_a(pair), view(pair.a)),
                       adapter.pack(type, pair.rows, pair.rank, view(pair.b)), pair.scale};
    const int vocab = model.spec().vocab_size, width = model.spec().width;
    if (pair.name == "token_embd") {
        require(pair.rows == width && pair.columns == vocab, "a pair of the embedding has the wrong shape");
        adapter.embedding = packed;
    } else if (pair.name == "output") {
        require(model.plan().head != nullptr && pair.rows == vocab && pair.columns == width,
                "a pair of the head has the wrong shape");
        adapter.head = packed;
    } else {
        adapter.add(&model.weights().matrix(pair.name + ".weight", pair.rows, pair.columns), packed);
    }
}

}  // namespace

std::shared_ptr<Adapter> make_adapter(const Model& model, Type type, nb::sequence pairs) {
    require(type == Type::F16 || type == Type::F32, "the pairs of an adapter are f16 or f32");
    std::vector<PairArrays> found;
    size_t bytes = 0;
    for (nb::handle one : pairs) {
        const PairArrays& pair = found.emplace_back(read_pair(one));
        require(pair.rows > 0 && pair.columns > 0 && pair.rank > 0 && pair.rank <= kMaxRank,
                pair.name + ": a pair has the wrong shape");
        bytes += Weights::packed_bytes(type, 1, rows_of_a(pair), columns_of_a(pair)) +
                 Weights::packed_bytes(type, 1, pair.rows, pair.rank);
    }
    require(!found.empty(), "an adapter has at least one pair");
    ReleasedGil release;
    auto adapter = std::make_shared<Adapter>(bytes, &model.weights());
    for (const PairArrays& pair : found) add_pair(model, *adapter, type, pair);
    return adapter;
}

std::vector<AdapterUses> read_uses(nb::handle adapters, size_t count) {
    std::vector<AdapterUses> found;
    for (nb::handle uses : adapters) {
        AdapterUses& own = found.emplace_back();
        for (nb::handle use : uses)
            own.push_back({field<std::shared_ptr<Adapter>>(use, "handle"), field<float>(use, "scale")});
    }
    require(found.empty() || found.size() == count, "adapters are named for every sequence, or for none");
    return found;
}

}  // namespace kvarn
