/* What a kernel's compiled host code calls of the CUDA runtime and of TVM-FFI: linked with it into a library of its own.
   Launches go to the emulator, errors of the argument checks into a text. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    uint32_t grid[3], block[3];
    int64_t shared;
    void *stream, *attributes;
    int32_t attribute_count;
} Config;

const void *(*stub_find)(void *programs, const char *name);
int32_t (*stub_launch)(const void *program, const uint32_t *grid, const uint32_t *block, uint64_t shared, void **arguments);
void *stub_programs;
char stub_error[4096];

int __cute_internal_kernel_cuda_load(void **library);

int _cudaLaunchKernelEx(Config *config, const void *program, void **arguments) {
    if (!program) return 98;
    return stub_launch(program, config->grid, config->block, (uint64_t)config->shared, arguments) ? 719 : 0;
}
int _cudaLibraryLoadData(void **library, void *a, void *b, void *c, int d, void *e, void *f, int g) { *library = stub_programs; return 0; }
int _cudaLibraryGetKernel(const void **kernel, void *library, const char *name) {
    *kernel = stub_find(stub_programs, name);
    return *kernel ? 0 : 98;
}
int _cuKernelGetAttribute(int *value, int which, void *kernel, int device) { *value = 0; return 0; }
int _cudaDeviceGetAttribute(int *value, int which, int device) { *value = 232448; return 0; }
int _cudaFuncSetAttribute(void *kernel, int which, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int which, int value, int device) { return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { return 0; }
void *TVMFFIEnvGetStream(int kind, int device) { return 0; }
int cuda_dialect_init_library_once(void *library, void *init, void *load, void *error) {
    void *handle = stub_programs;
    return __cute_internal_kernel_cuda_load(&handle);
}
void cuda_dialect_unload_library_once(void *library) {}
const char *cuda_dialect_get_error_name(int code) { return "CUDA error"; }
void CuteDSLRT_TVMFFISetRaisedCudaError(void *a, int code) { snprintf(stub_error, sizeof stub_error, "CUDA error %d", code); }
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *text) { snprintf(stub_error, sizeof stub_error, "%s: %s", kind, text); }
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int count) {
    snprintf(stub_error, sizeof stub_error, "%s: ", kind);
    for (int i = 0; i < count; i++)
        if (parts[i]) strncat(stub_error, parts[i], sizeof stub_error - strlen(stub_error) - 1);
}
