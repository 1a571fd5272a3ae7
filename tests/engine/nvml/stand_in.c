/* A libnvidia-ml.so.1 for tests. The file that SOL_STAND_IN_NVML names says what machine it plays, in lines
 *     key value            of the whole machine:  count, driver, cuda, init
 *     <gpu>.key value      of one board:          name, uuid, ..., lost, process (repeatable: pid bytes), xid
 * It is read at every call, so a test changes the machine while something is watching it. Without the variable there is
 * no driver. Values that are not given answer NOT_SUPPORTED, as boards do. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, NO_DRIVER = 9, TIMEOUT = 10,
       LOST = 15 };
typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { u64 total, free, used; } Memory;
typedef struct { u32 version; u64 total, reserved, free, used; } Memory2;
typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } Process;
typedef struct { void *device; u64 type, data; u32 gpu_instance, compute_instance; } Event;

static int find(const char *wanted, int nth, char *out, size_t size) {
    const char *path = getenv("SOL_STAND_IN_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], key[128];
    int found = 0, at;
    if (!file) return 0;
    while (!found && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%127s %n", key, &at) == 1 && !strcmp(key, wanted) && nth-- == 0) {
            line[strcspn(line, "\n")] = 0;
            snprintf(out, size, "%s", line + at);
            found = 1;
        }
    }
    fclose(file);
    return found;
}
static int of_nth(void *device, const char *key, int nth, char *out, size_t size) {
    char full[128];
    snprintf(full, sizeof full, "%d.%s", (int)(long)device - 1, key);
    return find(full, nth, out, size);
}
static int state(void *device) {
    char value[64];
    if (!getenv("SOL_STAND_IN_NVML")) return UNINITIALIZED;
    return of_nth(device, "lost", 0, value, sizeof value) ? LOST : OK;
}
static int number(void *device, const char *key, u64 *out) {
    char value[128];
    int code = state(device);
    if (code) return code;
    if (!of_nth(device, key, 0, value, sizeof value)) return NOT_SUPPORTED;
    *out = strtoull(value, NULL, 0);
    return OK;
}
static int small(void *device, const char *key, u32 *out) {
    u64 value;
    int code = number(device, key, &value);
    if (!code) *out = (u32)value;
    return code;
}
static int text(void *device, const char *key, char *out, u32 size) {
    int code = state(device);
    if (code) return code;
    return of_nth(device, key, 0, out, size) ? OK : NOT_SUPPORTED;
}

int nvmlInitWithFlags(u32 flags) {
    char value[64];
    if (!getenv("SOL_STAND_IN_NVML")) return NO_DRIVER;
    return find("init", 0, value, sizeof value) ? atoi(value) : OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) {
    switch (code) {
    case NO_DRIVER: return "Driver Not Loaded";
    case NOT_SUPPORTED: return "Not Supported";
    case LOST: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Error of the stand-in";
    }
}
int nvmlSystemGetDriverVersion(char *out, u32 size) { return find("driver", 0, out, size) ? OK : NOT_SUPPORTED; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    char value[64];
    if (!find("cuda", 0, value, sizeof value)) return NOT_SUPPORTED;
    *out = atoi(value);
    return OK;
}
int nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }
int nvmlDeviceGetCount_v2(u32 *out) {
    char value[64];
    *out = find("count", 0, value, sizeof value) ? (u32)atoi(value) : 0;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **out) {
    *out = (void *)(long)(index + 1);
    return state(*out);
}
int nvmlDeviceGetName(void *d, char *out, u32 size) { return text(d, "name", out, size); }
int nvmlDeviceGetUUID(void *d, char *out, u32 size) { return text(d, "uuid", out, size); }
int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) {
    char value[64];
    int code = text(d, "capability", value, sizeof value);
    return code ? code : sscanf(value, "%d.%d", major, minor) == 2 ? OK : INVALID;
}
int nvmlDeviceGetMemoryInfo(void *d, Memory *out) {
    u64 total, used = 0;
    int code = number(d, "memory_total", &total);
    if (code) return code;
    number(d, "memory_used", &used);
    *out = (Memory){total, total - used, used};
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *d, Memory2 *out) {
    Memory m;
    int code = nvmlDeviceGetMemoryInfo(d, &m);
    if (!code) { out->total = m.total; out->reserved = 0; out->free = m.free; out->used = m.used; }
    return code;
}
int nvmlDeviceGetEnforcedPowerLimit(void *d, u32 *out) { return small(d, "power_limit", out); }
int nvmlDeviceGetPowerManagementDefaultLimit(void *d, u32 *out) { return small(d, "power_default", out); }
int nvmlDeviceGetPowerUsage(void *d, u32 *out) { return small(d, "power", out); }
int nvmlDeviceGetTotalEnergyConsumption(void *d, u64 *out) { return number(d, "energy", out); }
int nvmlDeviceGetMaxClockInfo(void *d, u32 kind, u32 *out) { return small(d, kind == 2 ? "memory_clock_max" : "sm_clock_max", out); }
int nvmlDeviceGetClockInfo(void *d, u32 kind, u32 *out) { return small(d, kind == 2 ? "memory_clock" : "sm_clock", out); }
int nvmlDeviceGetTemperature(void *d, u32 sensor, u32 *out) { return small(d, "temperature", out); }
int nvmlDeviceGetCurrentClocksEventReasons(void *d, u64 *out) { return number(d, "reasons", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, u64 *out) { return number(d, "reasons", out); }
int nvmlDeviceGetPcieThroughput(void *d, u32 counter, u32 *out) { return small(d, counter ? "pcie_rx" : "pcie_tx", out); }
int nvmlDeviceGetEccMode(void *d, u32 *current, u32 *pending) {
    int code = small(d, "ecc", current);
    if (!code) *pending = *current;
    return code;
}
int nvmlDeviceGetTotalEccErrors(void *d, u32 kind, u32 counter, u64 *out) { return number(d, kind ? "ecc_uncorrected" : "ecc_corrected", out); }
int nvmlDeviceGetMigMode(void *d, u32 *current, u32 *pending) {
    int code = small(d, "mig", current);
    if (!code) *pending = *current;
    return code;
}
int nvmlDeviceGetPersistenceMode(void *d, u32 *out) { return small(d, "persistence", out); }
int nvmlDeviceGetVirtualizationMode(void *d, u32 *out) { return small(d, "virtualisation", out); }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, u32 *out) { return small(d, "pcie_width", out); }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, u32 *out) { return small(d, "pcie_width_max", out); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, u32 *out) { return small(d, "pcie_generation", out); }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, u32 *out) { return small(d, "pcie_generation_max", out); }
int nvmlDeviceGetNvLinkState(void *d, u32 link, u32 *out) {
    u64 links;
    int code = number(d, "nvlinks", &links);
    if (code) return code;
    if (link >= links) return INVALID;
    *out = 1;
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, u32 *out) { return small(a, "ancestor", out); }
static int processes(void *d, u32 *count, Process *out) {
    char value[128];
    u32 found = 0;
    int code = state(d);
    if (code) return code;
    while (of_nth(d, "process", (int)found, value, sizeof value)) {
        if (out && found < *count) {
            Process p = {0, 0, ~0u, ~0u};
            sscanf(value, "%u %llu", &p.pid, &p.used);
            out[found] = p;
        }
        found++;
    }
    code = found > (out ? *count : 0) ? SMALL : OK;
    *count = found;
    return code;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, u32 *count, Process *out) { return processes(d, count, out); }
int nvmlEventSetCreate(void **out) { *out = calloc(1, 256 * sizeof(int)); return OK; }
int nvmlEventSetFree(void *set) { free(set); return OK; }
int nvmlDeviceRegisterEvents(void *d, u64 kinds, void *set) {
    char value[64];
    return text(d, "no_events", value, sizeof value) == OK ? NOT_SUPPORTED : OK;
}
int nvmlEventSetWait_v2(void *set, Event *out, u32 timeout_ms) {
    int *told = set;
    char value[64];
    for (long gpu = 1; gpu < 256; gpu++)
        if (of_nth((void *)gpu, "xid", told[gpu], value, sizeof value)) {
            told[gpu]++;
            *out = (Event){(void *)gpu, 8, strtoull(value, NULL, 0), ~0u, ~0u};
            return OK;
        }
    usleep(1000 * timeout_ms);
    return TIMEOUT;
}
