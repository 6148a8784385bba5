// Layers with a state, and what all parts of a spec are read with.
#pragma once
#include <nanobind/stl/string.h>

#include "../base/check.h"
#include "arrays.h"
#include "spec.h"

namespace kvarn {

// A number that is 0 where Python has None.
template <class T>
T or_zero(nb::handle object, const char* name) {
    nb::object value = object.attr(name);
    return value.is_none() ? T{0} : nb::cast<T>(value);
}

inline NormSpec read_norm(nb::handle norm) {
    bool is_rms = field<std::string>(norm, "kind") == "rms";
    return {is_rms, field<float>(norm, "eps"), !is_rms};  // the kernel of layer norms always adds a bias
}

inline std::optional<NormSpec> read_optional_norm(nb::handle object, const char* name) {
    nb::object norm = object.attr(name);
    if (norm.is_none()) return std::nullopt;
    return read_norm(norm);
}

inline void read_state_space(nb::handle mixer, RecurrentSpec& r) {
    r.kind = RecurrentKind::state_space;
    r.num_key_heads = field<int>(mixer, "num_groups");
    r.num_value_heads = field<int>(mixer, "num_heads");
    r.key_dim = field<int>(mixer, "state_dim");
    r.value_dim = field<int>(mixer, "head_dim");
    r.norm = read_optional_norm(mixer, "norm");
    r.has_conv_bias = field<bool>(mixer, "conv_bias");
    r.has_bias = field<bool>(mixer, "bias");
    r.has_output_bias = field<bool>(mixer, "output_bias");
    r.is_norm_first = field<bool>(mixer, "norm_first");
    r.min_step = field<float>(mixer, "min_step");
    if (nb::object most = mixer.attr("max_step"); !most.is_none()) r.max_step = nb::cast<float>(most);
    require(r.num_key_heads > 0 && r.num_value_heads > 0 && r.num_value_heads % r.num_key_heads == 0 && r.key_dim > 0 &&
                r.value_dim > 0 && (!r.norm || r.norm->is_rms),
            "heads of a state space do not divide evenly over its groups, or its norm is none of rms");
}

inline void read_selective(nb::handle mixer, RecurrentSpec& r) {
    r.kind = RecurrentKind::selective;
    r.conv_width = field<int>(mixer, "width");
    r.num_key_heads = 1;
    r.key_dim = field<int>(mixer, "state_dim");
    r.value_dim = kSelectiveColumns;
    r.num_value_heads = (r.conv_width + kSelectiveColumns - 1) / kSelectiveColumns;
    r.rank = field<int>(mixer, "rank");
    r.has_conv_bias = field<bool>(mixer, "conv_bias");
    r.has_bias = r.has_output_bias = field<bool>(mixer, "bias");
    r.has_parameter_norm = !mixer.attr("parameter_norm_eps").is_none();
    r.parameter_norm_eps = or_zero<float>(mixer, "parameter_norm_eps");
    require(r.conv_width > 0 && r.key_dim > 0 && r.rank > 0, "a selective layer needs channels, a state and a rank");
}

inline RecurrentSpec read_recurrent(nb::handle mixer) {
    RecurrentSpec r;
    r.kernel = field<int>(mixer, "kernel");
    if (nb::hasattr(mixer, "num_groups")) {
        read_state_space(mixer, r);
    } else if (nb::hasattr(mixer, "state_dim")) {
        read_selective(mixer, r);
    } else if (nb::hasattr(mixer, "width")) {
        r.conv_width = field<int>(mixer, "width");
    } else {
        r.kind = RecurrentKind::delta_net;
        r.num_key_heads = field<int>(mixer, "num_key_heads");
        r.num_value_heads = field<int>(mixer, "num_value_heads");
        r.key_dim = field<int>(mixer, "key_dim");
        r.value_dim = field<int>(mixer, "value_dim");
        r.is_tiled = field<bool>(mixer, "tiled");
        r.norm = read_norm(mixer.attr("norm"));
        require(r.num_key_heads > 0 && r.num_value_heads > 0 && r.num_value_heads % r.num_key_heads == 0 &&
                    r.key_dim > 0 && r.value_dim > 0,
                "value heads do not divide evenly over the key heads");
    }
    require(r.kernel > 0 && r.kernel <= kMaxConvKernel && r.channels() > 0, "a convolution of 1 to 64 rows is needed");
    return r;
}

}  // namespace kvarn
