// Shows a program a processor without AVX-512, so that a benchmark can compare engines as an AVX2 machine would.
//
//     gcc -O2 -shared -fPIC benchmarks/without_avx512.c -o without_avx512.so
//     LD_PRELOAD=$PWD/without_avx512.so python -m benchmarks.peers MODEL.gguf
//
// Linux on Intel, where the processor can refuse CPUID (`cpuid_fault` in /proc/cpuinfo): the refusal arrives as SIGSEGV,
// and the handler answers with the real registers less the bits of AVX-512, VNNI and AMX.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012, REFUSE = 0, ALLOW = 1, FEATURES = 7 };

static const uint32_t AVX512_EBX = 1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31;
static const uint32_t AVX512_ECX = 1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14;
static const uint32_t AVX512_EDX = 1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;
static const uint32_t VNNI_AND_BF16_EAX = 1u << 4 | 1u << 5;

static void answer(greg_t* registers) {
  const uint32_t leaf = (uint32_t)registers[REG_RAX], subleaf = (uint32_t)registers[REG_RCX];
  uint32_t eax, ebx, ecx, edx;
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, ALLOW);
  __cpuid_count(leaf, subleaf, eax, ebx, ecx, edx);
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, REFUSE);
  if (leaf == FEATURES && subleaf == 0) {
    ebx &= ~AVX512_EBX;
    ecx &= ~AVX512_ECX;
    edx &= ~AVX512_EDX;
  } else if (leaf == FEATURES && subleaf == 1) {
    eax &= ~VNNI_AND_BF16_EAX;
  }
  registers[REG_RAX] = eax;
  registers[REG_RBX] = ebx;
  registers[REG_RCX] = ecx;
  registers[REG_RDX] = edx;
  registers[REG_RIP] += 2;
}

static void on_fault(int number, siginfo_t* info, void* context) {
  (void)info;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* code = (const uint8_t*)registers[REG_RIP];
  if (code[0] == 0x0f && code[1] == 0xa2) {
    answer(registers);
  } else {
    signal(number, SIG_DFL);  // a real fault: it happens again, and ends the process
  }
}

__attribute__((constructor)) static void install(void) {
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGSEGV, &action, NULL);
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, REFUSE) != 0) {
    static const char message[] = "without_avx512: this processor or kernel cannot refuse CPUID\n";
    (void)!write(2, message, sizeof message - 1);
    _exit(1);
  }
}
