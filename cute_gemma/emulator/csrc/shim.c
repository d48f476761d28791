// Stands in for the CUDA runtime beneath the host code of a compiled CuTe DSL function. Linked into one shared library with
// that host code, so that nothing outside the library sees these names and every such library has its own state.
// Each kernel launch goes to a callback; queries are answered from a table that the caller fills in for the modelled device.
// What host code needs and this file lacks is a link error that names it.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum {                                  // cudaError_t
  SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE_FUNCTION = 98, INVALID_SYMBOL = 13, UNKNOWN = 999
};
enum { MAX_KERNELS = 64, MAX_ATTRIBUTES = 256 };
enum { FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1, FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };

typedef struct { const char *name; int static_smem, max_dynamic_smem; } Kernel;
typedef int (*LaunchCallback)(const char *kernel, int max_dynamic_smem, const void *config, void **args);

static Kernel kernels[MAX_KERNELS];
static int nkernels;
static int device_attributes[MAX_ATTRIBUTES];
static uint8_t device_attribute_known[MAX_ATTRIBUTES];
static LaunchCallback on_launch;
static char error_kind[128], error_message[8192];
static const void *image;

// ---------------------------------------------------------------- for capture.py
EXPORT void shim_set_callback(LaunchCallback callback) { on_launch = callback; }
EXPORT const char *shim_error_kind(void) { return error_kind; }
EXPORT const char *shim_error_message(void) { return error_message; }
EXPORT void shim_clear_error(void) { error_kind[0] = error_message[0] = 0; }
EXPORT const void *shim_image(void) { return image; }

EXPORT int shim_set_device_attribute(int attribute, int value) {
  if (attribute < 0 || attribute >= MAX_ATTRIBUTES) return INVALID_VALUE;
  device_attributes[attribute] = value;
  device_attribute_known[attribute] = 1;
  return SUCCESS;
}

// `name` must outlive the library.
EXPORT int shim_add_kernel(const char *name, int static_smem) {
  if (nkernels == MAX_KERNELS) return INVALID_VALUE;
  kernels[nkernels++] = (Kernel){name, static_smem, 48 * 1024 - static_smem};
  return SUCCESS;
}

// ---------------------------------------------------------------- libraries, kernels, attributes
int _cudaLibraryLoadData(void **library, const void *code) {
  image = code;
  *library = kernels;
  return SUCCESS;
}

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  (void)library;
  for (int i = 0; i < nkernels; i++)
    if (!strcmp(kernels[i].name, name)) { *kernel = &kernels[i]; return SUCCESS; }
  return INVALID_SYMBOL;
}

int _cudaLibraryUnload(void *library) { (void)library; return SUCCESS; }

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  (void)device;
  if (attribute != FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) return INVALID_VALUE;
  *value = ((Kernel *)kernel)->static_smem;
  return SUCCESS;
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
  Kernel *k = kernel;
  if (attribute == FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value < 0 || value + k->static_smem > device_attributes[97]) return INVALID_VALUE;
    k->max_dynamic_smem = value;
  }
  return SUCCESS;                       // carve-out, non-portable cluster sizes: nothing to model
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  (void)device;
  return _cudaFuncSetAttribute(kernel, attribute, value);
}

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  if (attribute < 0 || attribute >= MAX_ATTRIBUTES || !device_attribute_known[attribute]) {
    snprintf(error_kind, sizeof error_kind, "NotImplementedError");
    snprintf(error_message, sizeof error_message,
             "host code asks for device attribute %d, which capture does not model", attribute);
    return INVALID_VALUE;
  }
  *value = device_attributes[attribute];
  return SUCCESS;
}

int _cudaGetDevice(int *device) { *device = 0; return SUCCESS; }
int _cudaGetDeviceCount(int *count) { *count = 1; return SUCCESS; }
int _cudaSetDevice(int device) { return device ? INVALID_VALUE : SUCCESS; }

int _cudaLaunchKernelEx(const void *config, void *kernel, void **args) {
  const Kernel *k = kernel;
  return on_launch ? on_launch(k->name, k->max_dynamic_smem, config, args) : UNKNOWN;
}

// ---------------------------------------------------------------- the DSL's own runtime helpers
int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int),
                                   void (*set_error)(const char *, const char *)) {
  if (*state) return SUCCESS;
  void *library = NULL;
  int error = init(&library);
  if (!error && load) error = load(&library, 0);
  if (!error) { *state = library; return SUCCESS; }
  if (!error_kind[0]) {
    char text[96];
    snprintf(text, sizeof text, "loading the kernels failed with CUDA error %d", error);
    set_error("RuntimeError", text);
  }
  return -1;
}

void cuda_dialect_unload_library_once(void **state) { *state = NULL; }

const char *cuda_dialect_get_error_name(int error) { return error ? "cudaErrorUnknown" : "cudaSuccess"; }

void cuda_dialect_print_on_error(int error) { (void)error; }

static void raise_cuda_error(int error) {
  if (error_kind[0]) return;            // the first error is the cause
  snprintf(error_kind, sizeof error_kind, "RuntimeError");
  snprintf(error_message, sizeof error_message, "host code stopped with CUDA error %d", error);
}

void cuda_dialect_assert_success(int error) { if (error) raise_cuda_error(error); }

// ---------------------------------------------------------------- what a TVM-FFI entry calls
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  size_t used = 0;
  snprintf(error_kind, sizeof error_kind, "%s", kind);
  error_message[0] = 0;
  for (int32_t i = 0; i < count && used + 1 < sizeof error_message; i++)
    if (parts[i]) used += (size_t)snprintf(error_message + used, sizeof error_message - used, "%s", parts[i]);
}

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &message, 1);
}

void *TVMFFIEnvGetStream(int32_t device_type, int32_t device) {
  (void)device_type; (void)device;
  return NULL;
}

void CuteDSLRT_TVMFFISetRaisedCudaError(void *raise, int error) { (void)raise; raise_cuda_error(error); }

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void *raise) {      // its other arguments describe the launch
  (void)raise;
  raise_cuda_error(9);                  // cudaErrorInvalidConfiguration
}
