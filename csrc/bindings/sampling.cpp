#include "sampling.h"

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "../base/check.h"

namespace kvarn {

namespace {

// Part i of an array that holds the parts of all rows.
template <class T>
std::span<const T> part(const In1<T>& values, const In1<int32_t>& starts, size_t i) {
    int32_t begin = starts.data()[i], end = starts.data()[i + 1];
    require(0 <= begin && begin <= end && static_cast<size_t>(end) <= values.size(), "starts of rows do not fit");
    return view(values).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

RowSampling read_record(const uint8_t* bytes) {
    SamplingRecord record;
    std::memcpy(&record, bytes, sizeof record);
    RowSampling row;
    row.temperature = record.temperature;
    row.top_p = record.top_p, row.min_p = record.min_p, row.typical_p = record.typical_p;
    row.repetition_penalty = record.repetition_penalty;
    row.presence_penalty = record.presence_penalty, row.frequency_penalty = record.frequency_penalty;
    row.xtc_probability = record.xtc_probability, row.xtc_threshold = record.xtc_threshold;
    row.cfg_scale = record.cfg_scale;
    row.top_k = static_cast<int>(record.top_k);
    row.seed = record.seed;
    row.choice = static_cast<uint32_t>(record.choice);
    row.position = static_cast<uint32_t>(record.position);
    row.draw = static_cast<uint32_t>(record.draw);
    return row;
}

}  // namespace

nb::dict sampling_record() {
    nb::list names, formats, offsets;
#define KVARN_FIELD(type, name)                                         \
    names.append(#name);                                                \
    formats.append(std::is_same_v<type, float> ? "float32" : "uint64"); \
    offsets.append(offsetof(SamplingRecord, name));
    KVARN_SAMPLING_FIELDS(KVARN_FIELD)
#undef KVARN_FIELD
    nb::dict record;
    record["names"] = names, record["formats"] = formats, record["offsets"] = offsets;
    record["itemsize"] = sizeof(SamplingRecord);
    return record;
}

std::vector<RowSampling> read_sampling(const SamplingArrays& arrays) {
    const auto& [records, bias_ids, bias_values, bias_starts, seen_ids, seen_counts, seen_starts, masked_rows, masks] =
        arrays;
    size_t count = records.shape(0);
    require(records.shape(1) == sizeof(SamplingRecord) && bias_starts.size() == count + 1 &&
                seen_starts.size() == count + 1 && bias_ids.size() == bias_values.size() &&
                seen_ids.size() == seen_counts.size() && masks.shape(0) == masked_rows.size(),
            "the arrays of the rows to sample do not fit together");
    std::vector<RowSampling> rows;
    for (size_t i = 0; i < count; ++i) {
        RowSampling& row = rows.emplace_back(read_record(records.data() + i * sizeof(SamplingRecord)));
        row.bias_ids = part(bias_ids, bias_starts, i), row.bias_values = part(bias_values, bias_starts, i);
        row.seen_ids = part(seen_ids, seen_starts, i), row.seen_counts = part(seen_counts, seen_starts, i);
    }
    for (size_t i = 0; i < masked_rows.size(); ++i) {
        int32_t row = masked_rows.data()[i];
        require(row >= 0 && static_cast<size_t>(row) < count, "a mask names a row that is not there");
        rows[static_cast<size_t>(row)].mask = view(masks).subspan(i * masks.shape(1), masks.shape(1));
    }
    return rows;
}

}  // namespace kvarn
