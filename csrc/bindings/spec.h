// Python's ModelSpec, read into the structs of model/spec.h.
#pragma once
#include <nanobind/nanobind.h>

#include "../model/spec.h"

namespace kvarn { ModelSpec read_spec(nanobind::handle spec); }  // namespace kvarn
