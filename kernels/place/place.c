/* Fill pages of a KV pool from blocks in host memory: gather, rotate and scatter in one pass. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, FLOAT16, BFLOAT16 };

/* Where the processor fuses at full speed torch's addcmul does as well: the bits are the same. */
#ifdef FP_FAST_FMAF
static inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
#else
static inline float multiply_add(float a, float b, float c) { return a * b + c; }
#endif

static inline float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_float16(uint16_t half)
{
    const uint32_t magnitude = half & 0x7fffu;
    const uint32_t rebias = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23; /* inf and nan */
    const uint32_t normal = (magnitude << 13) + rebias;
    const uint32_t subnormal = as_bits((float)(int32_t)magnitude * 0x1p-24f);
    return as_float((uint32_t)(half & 0x8000u) << 16 | (magnitude < 0x0400u ? subnormal : normal));
}

/* To nearest, ties to even. */
static inline uint16_t to_float16(float value)
{
    const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
    const uint32_t rounded = (magnitude - (112u << 23) + 0x0fffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t normal = magnitude >= 0x477ff000u ? 0x7c00u : rounded; /* 65520 and more */
    /* The last bit of a sum in [0.5, 1) counts 2^-24, as that of a subnormal half. */
    const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    return (uint16_t)(bits >> 16 & 0x8000u | (magnitude > 0x7f800000u ? 0x7e00u : finite));
}

static inline float from_bfloat16(uint16_t half) { return as_float((uint32_t)half << 16); }

/* To nearest, ties to even. */
static inline uint16_t to_bfloat16(float value)
{
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

static void widen(float *restrict out, const uint16_t *restrict x, int64_t n, int element)
{
    if (element == FLOAT16)
        for (int64_t i = 0; i < n; i++) out[i] = from_float16(x[i]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = from_bfloat16(x[i]);
}

static void narrow(uint16_t *restrict out, const float *restrict x, int64_t n, int element)
{
    if (element == FLOAT16)
        for (int64_t i = 0; i < n; i++) out[i] = to_float16(x[i]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = to_bfloat16(x[i]);
}

/* The pairs of one head; those of dimensions (i, i + half), or (2i, 2i + 1) if interleaved. */
static void turn(float *restrict out, const float *restrict x, const float *restrict cosine,
                 const float *restrict sine, int64_t half, int interleaved)
{
    if (interleaved)
        for (int64_t i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            out[2 * i] = multiply_add(-b, sine[i], a * cosine[i]);
            out[2 * i + 1] = multiply_add(a, sine[i], b * cosine[i]);
        }
    else
        for (int64_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            out[i] = multiply_add(-b, sine[i], a * cosine[i]);
            out[i + half] = multiply_add(a, sine[i], b * cosine[i]);
        }
}

static int is_still(const float *cosine, const float *sine, int64_t half)
{
    for (int64_t i = 0; i < half; i++)
        if (cosine[i] != 1.0f || sine[i] != 0.0f) return 0;
    return 1;
}

/* pool[pages[i]] = source[blocks[i]] for n blocks, bit for bit. */
void copy_blocks(char *restrict pool, const int64_t *pages, const char *restrict source,
                 int64_t block_stride_bytes, const int64_t *blocks, int64_t n, int64_t block_bytes)
{
    for (int64_t i = 0; i < n; i++)
        memcpy(pool + pages[i] * block_bytes, source + blocks[i] * block_stride_bytes,
               (size_t)block_bytes);
}

/* The same with token j of block i turned by row i * tokens + j of cosine and sine,
   [n * tokens, half]. scratch holds 4 * half floats; pool and source do not overlap. */
void place_blocks(char *restrict pool, const int64_t *pages, const char *restrict source,
                  int64_t block_stride_bytes, const int64_t *blocks, int64_t n, int64_t tokens,
                  int64_t heads, int64_t head_dim, int element, const float *cosine,
                  const float *sine, int64_t half, int interleaved, float *scratch)
{
    const int64_t element_bytes = element == FLOAT32 ? 4 : 2;
    const int64_t head_bytes = head_dim * element_bytes, turned_bytes = 2 * half * element_bytes;
    for (int64_t i = 0; i < n; i++) {
        const char *x = source + blocks[i] * block_stride_bytes;
        char *out = pool + pages[i] * tokens * heads * head_bytes;
        for (int64_t token = 0; token < tokens; token++, cosine += half, sine += half) {
            if (is_still(cosine, sine, half)) {
                memcpy(out, x, (size_t)(heads * head_bytes));
                x += heads * head_bytes, out += heads * head_bytes;
                continue;
            }
            for (int64_t head = 0; head < heads; head++, x += head_bytes, out += head_bytes) {
                if (element == FLOAT32) {
                    turn((float *)out, (const float *)x, cosine, sine, half, interleaved);
                } else {
                    widen(scratch, (const uint16_t *)x, 2 * half, element);
                    turn(scratch + 2 * half, scratch, cosine, sine, half, interleaved);
                    narrow((uint16_t *)out, scratch + 2 * half, 2 * half, element);
                }
                memcpy(out + turned_bytes, x + turned_bytes, (size_t)(head_bytes - turned_bytes));
            }
        }
    }
}
