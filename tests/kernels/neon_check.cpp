// The kernel tests for an ARM CPU, or its emulator, without Python: every table it offers. Prints their names and
// each broken promise; exit status 1 if there is one. With any argument: the names only.
#include "neon_check.h"

#include <cstdio>

#include "kernels/cpu.h"

namespace kvarn::check {

int failures = 0;

void expect(bool holds, const std::string& promise) {
    if (holds) return;
    ++failures;
    if (failures <= 50) std::printf("BROKEN %s\n", promise.c_str());
}

// neon_dot and neon_i8mm change nothing but products, and those not by a bit.
static void check_table(const std::string& name) {
    const KernelTable& table = select_table(name.c_str());
    const bool is_derived = name != "neon";
    check_products(table, is_derived ? &select_table("neon") : nullptr);
    if (is_derived) return;
    check_rows(table);
    check_low_rank(table);
    check_attention(table);
}

}  // namespace kvarn::check

int main(int argc, char**) {
    std::printf("tables:");
    for (const std::string& name : kvarn::kernel_tables()) std::printf(" %s", name.c_str());
    std::printf("\n");
    if (argc > 1) return 0;
    for (const std::string& name : kvarn::kernel_tables())
        if (name != "scalar") kvarn::check::check_table(name);
    std::printf("%d broken promises\n", kvarn::check::failures);
    return kvarn::check::failures > 0;
}
