#include "matmul.h"

#include "tiles.h"

namespace kvarn::avx512_amx {

constinit const KernelTable matmul_kernels = make_matmul_kernels<Tiles>();

}  // namespace kvarn::avx512_amx
