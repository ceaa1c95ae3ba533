/* Stands for AMD's HIP and its compiler: keeps what it was called with, and fails where it is told to. */
#include <stdint.h>
#include <string.h>

struct Seen {
    uint32_t grid[3], threads, shared_bytes, launches, loaded, compiled, headers;
    uint64_t function, stream;
    uint8_t code[16], parameters[184];
    char entry[32], options[160];
} seen;
int failing;  /* what the next launch returns */
int refusing; /* what the next compilations return */

int hiprtcVersion(int *major, int *minor) { return *major = 9, *minor = 0, 0; }
const char *hiprtcGetErrorString(int error) { return error == 6 ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_SUCCESS"; }
int hiprtcCreateProgram(void **program, const char *source, const char *name, int headers, const char **texts, const char **names) {
    seen.headers = headers;
    return *program = (void *)source, !(name && texts[0] && names[0]);
}
int hiprtcCompileProgram(void *program, int count, const char **options) {
    seen.options[0] = 0;
    for (int i = 0; i < count; i++) strcat(strcat(seen.options, i ? " " : ""), options[i]);
    if (refusing) return refusing;
    return seen.compiled++, !program;
}
static const char *const LOG = "card.h:1:2: error: nothing is right", *const CODE = "\x7f" "ELF for a card";
int hiprtcGetProgramLogSize(void *program, size_t *size) { return *size = refusing ? strlen(LOG) : 0, !program; }
int hiprtcGetProgramLog(void *program, char *log) { return memcpy(log, LOG, refusing ? strlen(LOG) : 0), !program; }
int hiprtcGetCodeSize(void *program, size_t *size) { return *size = strlen(CODE), !program; }
int hiprtcGetCode(void *program, char *code) { return memcpy(code, CODE, strlen(CODE)), !program; }
int hiprtcDestroyProgram(void **program) { return *program = 0, 0; }

int hipRuntimeGetVersion(int *version) { return *version = 70213010, 0; }
const char *hipGetErrorString(int error) { return error == 700 ? "an illegal memory access" : "unknown error"; }
int hipModuleLoadData(void **module, const void *image) {
    memcpy(seen.code, image, sizeof seen.code);
    seen.loaded++;
    return *module = (void *)0x7f1234567890, 0;
}
int hipModuleGetFunction(void **function, void *module, const char *name) {
    strncpy(seen.entry, name, sizeof seen.entry - 1);
    return *function = (void *)((uintptr_t)module + seen.loaded), 0;
}
int hipModuleLaunchKernel(void *function, unsigned int x, unsigned int y, unsigned int z, unsigned int threads, unsigned int b, unsigned int c,
                          unsigned int shared_bytes, void *stream, void **parameters, void **extra) {
    if (failing || b != 1 || c != 1 || extra) return failing ? failing : 1;
    seen.grid[0] = x, seen.grid[1] = y, seen.grid[2] = z, seen.threads = threads, seen.shared_bytes = shared_bytes;
    seen.function = (uintptr_t)function, seen.stream = (uintptr_t)stream;
    memcpy(seen.parameters, parameters[0], sizeof seen.parameters);
    seen.launches++;
    return 0;
}
