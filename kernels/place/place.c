/* Fill pages of a KV pool from blocks in host memory: gather, rotate and scatter in one pass. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

enum { FLOAT32, FLOAT16, BFLOAT16 };

/* Where the processor fuses at full speed, torch's addcmul does as well: the bits are the same. */
#ifdef FP_FAST_FMAF
#define MULTIPLY_ADD(a, b, c) fmaf(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
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
    const uint32_t number = magnitude < 0x38800000u ? subnormal : normal;
    return (uint16_t)((bits >> 16 & 0x8000u) | (magnitude > 0x7f800000u ? 0x7e00u : number));
}

/* To nearest, ties to even. */
static inline uint16_t to_bfloat16(float value)
{
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

static inline float load(const void *x, int64_t i, int element)
{
    if (element == FLOAT32) return ((const float *)x)[i];
    const uint16_t half = ((const uint16_t *)x)[i];
    return element == FLOAT16 ? from_float16(half) : as_float((uint32_t)half << 16);
}

static inline void store(void *out, int64_t i, float value, int element)
{
    if (element == FLOAT32)
        ((float *)out)[i] = value;
    else
        ((uint16_t *)out)[i] = element == FLOAT16 ? to_float16(value) : to_bfloat16(value);
}

#if defined(__F16C__) && defined(__FMA__)
/* Compilers do not vectorise these conversions: eight NeoX pairs of float16 at a time.
   Returns how many of the head's pairs are done. */
static inline int64_t turn_eights(uint16_t *restrict out, const uint16_t *restrict x,
                                  const float *restrict cosine, const float *restrict sine,
                                  int64_t half)
{
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
        const __m256 a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i)));
        const __m256 b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i + half)));
        const __m256 c = _mm256_loadu_ps(cosine + i), s = _mm256_loadu_ps(sine + i);
        const __m256 new_a = _mm256_fnmadd_ps(b, s, _mm256_mul_ps(a, c));
        const __m256 new_b = _mm256_fmadd_ps(a, s, _mm256_mul_ps(b, c));
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(new_a, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128((__m128i *)(out + i + half),
                         _mm256_cvtps_ph(new_b, _MM_FROUND_TO_NEAREST_INT));
    }
    return i;
}
#else
#define turn_eights(out, x, cosine, sine, half) 0
#endif

/* The pairs of one head: dimensions (i, i + half), or (2i, 2i + 1) if interleaved. */
static inline void turn(void *restrict out, const void *restrict x, const float *restrict cosine,
                        const float *restrict sine, int64_t half, int interleaved, int element)
{
    const int64_t step = interleaved ? 2 : 1, mate = interleaved ? 1 : half;
    int64_t i = element == FLOAT16 && !interleaved ? turn_eights(out, x, cosine, sine, half) : 0;
    for (; i < half; i++) {
        const float a = load(x, step * i, element), b = load(x, step * i + mate, element);
        store(out, step * i, MULTIPLY_ADD(-b, sine[i], a * cosine[i]), element);
        store(out, step * i + mate, MULTIPLY_ADD(a, sine[i], b * cosine[i]), element);
    }
}

/* The heads of one token. Inlined with the last two arguments known, so that each of their values
   has a loop of its own. */
static inline void turn_heads(char *restrict out, const char *restrict x, const float *cosine,
                              const float *sine, int64_t half, int64_t heads, int64_t head_dim,
                              int interleaved, int element)
{
    const int64_t element_bytes = element == FLOAT32 ? 4 : 2;
    const int64_t head_bytes = head_dim * element_bytes, turned_bytes = 2 * half * element_bytes;
    for (int64_t head = 0; head < heads; head++, x += head_bytes, out += head_bytes) {
        turn(out, x, cosine, sine, half, interleaved, element);
        if (turned_bytes < head_bytes)
            memcpy(out + turned_bytes, x + turned_bytes, (size_t)(head_bytes - turned_bytes));
    }
}

static int is_still(const float *cosine, const float *sine, int64_t half)
{
    for (int64_t i = 0; i < half; i++)
        if (cosine[i] != 1.0f || sine[i] != 0.0f) return 0;
    return 1;
}

/* Past the cache: a line of the target is not fetched only to be overwritten as a whole. */
static void copy(char *restrict out, const char *restrict x, int64_t size_bytes)
{
#ifdef __AVX__
    if ((uintptr_t)out % 32 == 0)
        for (; size_bytes >= 32; size_bytes -= 32, out += 32, x += 32)
            _mm256_stream_si256((__m256i *)out, _mm256_loadu_si256((const __m256i *)x));
#endif
    memcpy(out, x, (size_t)size_bytes);
}

/* pool[pages[i]] = source[blocks[i]] for n blocks, bit for bit. */
void copy_blocks(char *restrict pool, const int64_t *pages, const char *restrict source,
                 int64_t block_stride_bytes, const int64_t *blocks, int64_t n, int64_t block_bytes)
{
    for (int64_t i = 0; i < n; i++)
        copy(pool + pages[i] * block_bytes, source + blocks[i] * block_stride_bytes, block_bytes);
#ifdef __AVX__
    _mm_sfence(); /* so that whoever is told of these pages sees them */
#endif
}

/* The same, with token j of block i turned by row i * tokens + j of cosine and sine, each
   [n * tokens, half]. pool and source do not overlap. */
void rotate_blocks(char *restrict pool, const int64_t *pages, const char *restrict source,
                   int64_t block_stride_bytes, const int64_t *blocks, int64_t n, int64_t tokens,
                   int64_t heads, int64_t head_dim, int element, const float *cosine,
                   const float *sine, int64_t half, int interleaved)
{
    const int64_t token_bytes = heads * head_dim * (element == FLOAT32 ? 4 : 2);
    for (int64_t i = 0; i < n; i++) {
        const char *x = source + blocks[i] * block_stride_bytes;
        char *out = pool + pages[i] * tokens * token_bytes;
        for (int64_t token = 0; token < tokens; token++, x += token_bytes, out += token_bytes) {
            const float *c = cosine + (i * tokens + token) * half;
            const float *s = sine + (i * tokens + token) * half;
            if (is_still(c, s, half)) {
                memcpy(out, x, (size_t)token_bytes);
                continue;
            }
            switch (2 * element + (interleaved != 0)) {
            case 2 * FLOAT32:
                turn_heads(out, x, c, s, half, heads, head_dim, 0, FLOAT32);
                break;
            case 2 * FLOAT32 + 1:
                turn_heads(out, x, c, s, half, heads, head_dim, 1, FLOAT32);
                break;
            case 2 * FLOAT16:
                turn_heads(out, x, c, s, half, heads, head_dim, 0, FLOAT16);
                break;
            case 2 * FLOAT16 + 1:
                turn_heads(out, x, c, s, half, heads, head_dim, 1, FLOAT16);
                break;
            case 2 * BFLOAT16:
                turn_heads(out, x, c, s, half, heads, head_dim, 0, BFLOAT16);
                break;
            default:
                turn_heads(out, x, c, s, half, heads, head_dim, 1, BFLOAT16);
            }
        }
    }
}
