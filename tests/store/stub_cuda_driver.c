/* A CUDA driver without a device. It says its version, which KvikIO waits for, and answers
   everything else with CUDA_ERROR_NOT_INITIALIZED: KvikIO then takes a pointer for host memory. */

#define NOT_INITIALIZED 3
#define REFUSES(name) \
    int name(void) { return NOT_INITIALIZED; }

int cuDriverGetVersion(int *version) {
    *version = 12080;
    return 0;
}

int cuGetErrorName(int error, const char **text) {
    *text = "CUDA_ERROR_NOT_INITIALIZED";
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    *text = "there is no device";
    return 0;
}

REFUSES(cuInit)
REFUSES(cuMemHostAlloc)
REFUSES(cuMemFreeHost)
REFUSES(cuMemHostRegister_v2)
REFUSES(cuMemHostUnregister)
REFUSES(cuMemcpyHtoDAsync_v2)
REFUSES(cuMemcpyDtoHAsync_v2)
REFUSES(cuMemcpyAsync)
REFUSES(cuMemcpyBatchAsync)
REFUSES(cuPointerGetAttribute)
REFUSES(cuPointerGetAttributes)
REFUSES(cuCtxCreate_v2)
REFUSES(cuCtxDestroy_v2)
REFUSES(cuCtxPushCurrent_v2)
REFUSES(cuCtxPopCurrent_v2)
REFUSES(cuCtxGetCurrent)
REFUSES(cuCtxGetDevice)
REFUSES(cuMemGetAddressRange_v2)
REFUSES(cuDeviceGet)
REFUSES(cuDeviceGetCount)
REFUSES(cuDeviceGetAttribute)
REFUSES(cuDevicePrimaryCtxRetain)
REFUSES(cuDevicePrimaryCtxRelease_v2)
REFUSES(cuStreamSynchronize)
REFUSES(cuStreamCreate)
REFUSES(cuStreamDestroy_v2)
REFUSES(cuEventSynchronize)
REFUSES(cuEventCreate)
REFUSES(cuEventDestroy_v2)
REFUSES(cuEventRecord)
REFUSES(cuEventQuery)
REFUSES(cuLaunchHostFunc)
