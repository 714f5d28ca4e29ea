// TMA: loads that complete later, and stores that read shared memory later.
#include <cstring>

#include "cuda/platform/sm90_ptx.h"
#include "emulator/machine.h"

namespace tk::emulator {

namespace {

constexpr size_t kChunk = 16;

// One row of a box: its address, and the range of bytes that are inside of the tensor.
struct BoxRow {
  unsigned char* global;  // address of byte 0, which may be outside
  int64_t first, last;    // bytes inside of the tensor: first <= n < last
};

size_t row_bytes(const Transfer& transfer) {
  const cuda::TensorBox& tensor = transfer.tensor;
  return tensor.rank ? tensor.box[0] * cuda::element_bytes(tensor.type) : transfer.bytes;
}

size_t row_count(const Transfer& transfer) {
  size_t rows = 1;
  for (int n = 1; n < transfer.tensor.rank; ++n) rows *= transfer.tensor.box[n];
  return rows;
}

BoxRow box_row(const Transfer& transfer, size_t row) {
  const cuda::TensorBox& tensor = transfer.tensor;
  if (tensor.rank == 0) return {transfer.global, 0, static_cast<int64_t>(transfer.bytes)};
  const auto element = static_cast<int64_t>(cuda::element_bytes(tensor.type));
  auto offset = transfer.at[0] * element;
  bool inside = true;
  for (int n = 1; n < tensor.rank; ++n) {
    const int64_t at = transfer.at[n] + static_cast<int64_t>(row % tensor.box[n]);
    row /= tensor.box[n];
    inside &= at >= 0 && at < static_cast<int64_t>(tensor.size[n]);
    offset += at * static_cast<int64_t>(tensor.stride[n]);
  }
  const int64_t left = static_cast<int64_t>(tensor.size[0]) - transfer.at[0];
  const int64_t first = transfer.at[0] < 0 ? -int64_t{transfer.at[0]} : 0;
  const int64_t last = std::min<int64_t>(tensor.box[0], left);
  auto* const global = static_cast<unsigned char*>(tensor.data) + offset;
  if (!inside || last <= first) return {global, 0, 0};
  return {global, first * element, last * element};
}

// Swizzled shared-memory address of a 16-byte chunk of the box.
unsigned char* chunk_address(const Block& block, const Transfer& transfer, size_t chunk) {
  uint32_t address = block.shared.address(transfer.shared + chunk * kChunk);
  const unsigned chunks = transfer.tensor.rank ? cuda::swizzle_chunks(transfer.tensor.swizzle) : 1;
  address ^= (address >> 7 & (chunks - 1)) << 4;
  return block.shared.at(address);
}

template <typename Do>
void for_each_chunk(const Transfer& transfer, Do&& run) {
  const Block& block = *current->block;
  for (size_t chunk = 0; chunk < transfer.bytes / kChunk; ++chunk) {
    run(chunk_address(block, transfer, chunk));
  }
}

// Calls run(global, offset in the box, bytes) for each row that intersects the tensor.
template <typename Do>
void for_each_row(const Transfer& transfer, Do&& run) {
  const size_t bytes = row_bytes(transfer), rows = row_count(transfer);
  for (size_t n = 0; n < rows; ++n) {
    const BoxRow row = box_row(transfer, n);
    if (row.last > row.first) {
      run(row.global + row.first, n * bytes + static_cast<size_t>(row.first),
          static_cast<size_t>(row.last - row.first));
    }
  }
}

Transfer tensor_transfer(const cuda::TensorMap& map, const void* shared, const int* at, int rank,
                         const char* name, Site site) {
  Transfer transfer{cuda::decode(map), {}, nullptr, nullptr, 0, site, {}};
  if (transfer.tensor.rank == 0) fail(site, "%s: not a tensor map", name);
  if (transfer.tensor.rank != rank) {
    fail(site, "%s: %d coordinates for a tensor of rank %d", name, rank, transfer.tensor.rank);
  }
  for (int n = 0; n < rank; ++n) transfer.at[n] = at[n];
  if (at[0] * static_cast<int>(cuda::element_bytes(transfer.tensor.type)) % int{kChunk} != 0) {
    fail(site, "%s: column %d is not aligned to 16 bytes", name, at[0]);
  }
  transfer.bytes = row_bytes(transfer) * row_count(transfer);
  const unsigned chunks = cuda::swizzle_chunks(transfer.tensor.swizzle);
  check_shared(shared, transfer.bytes, 128, name, site);
  if (chunks > 1 && shared_address(shared) % (128 * chunks)) {
    fail(site, "%s: address %u of shared memory; its swizzle requires a multiple of %u", name,
         shared_address(shared), 128 * chunks);
  }
  transfer.shared = const_cast<unsigned char*>(static_cast<const unsigned char*>(shared));
  return transfer;
}

Transfer bulk_transfer(const void* shared, const void* global, uint32_t bytes, const char* name,
                       Site site) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) {
    fail(site, "%s: %u bytes of %p; must be multiples of 16", name, bytes, global);
  }
  check_shared(shared, bytes, 16, name, site);
  Transfer transfer{};
  transfer.shared = const_cast<unsigned char*>(static_cast<const unsigned char*>(shared));
  transfer.global = const_cast<unsigned char*>(static_cast<const unsigned char*>(global));
  transfer.bytes = bytes;
  transfer.site = site;
  return transfer;
}

// Reads global memory at issue, so that a bad address is reported for this thread. The data is
// written to shared memory later.
void issue_load(const Transfer& transfer, const uint64_t* barrier, const char* name) {
  const Site site = transfer.site;
  Load load{transfer, {}, barrier_for_copy(barrier, name, site)};
  if (races.on) load.transfer.step = races.begin_async();
  const int actor = load.transfer.step.thread;
  load.data.assign(transfer.bytes, 0);
  for_each_row(transfer, [&](const unsigned char* global, size_t offset, size_t count) {
    if (races.on) races.access(global, count, Access::kRead, {site}, actor);
    memcpy(load.data.data() + offset, global, count);
  });
  Block& block = *current->block;
  for_each_chunk(transfer, [&](unsigned char* place) {
    if (races.on) races.access(place, kChunk, Access::kAsyncWrite, {site}, actor);
    memset(place, kPoison, kChunk);
    memset(async_view(block, place), kPoison, kChunk);
  });
  block.sm90.loads.push_back(std::move(load));
  machine.maybe_yield();
}

uint64_t hash_of(Block& block, const Transfer& transfer) {
  uint64_t hash = 0;
  for (size_t chunk = 0; chunk < transfer.bytes / kChunk; ++chunk) {
    hash = hash_chunk(hash, block, chunk_address(block, transfer, chunk));
  }
  return hash;
}

void issue_store(const Transfer& transfer, bool add) {
  Block& block = *current->block;
  Sm90& state = sm90();
  Store store{transfer, add, hash_of(block, transfer), {}, {}};
  const Site site = transfer.site;
  if (races.on) {
    store.transfer.step = races.begin_async();
    store.write = races.begin_async();
    for_each_chunk(transfer, [&](const unsigned char* place) {
      races.access(place, kChunk, Access::kAsyncRead, {site}, store.transfer.step.thread);
    });
  }
  for_each_row(transfer, [&](unsigned char* global, size_t, size_t count) {
    if (races.on) {
      races.access(global, count, add ? races.float_add_access() : Access::kAsyncWrite, {site},
                   store.write.thread);
    }
    // Touch the destination, so that a bad address is reported for this thread.
    static_cast<void>(*static_cast<volatile unsigned char*>(global));
    static_cast<void>(*static_cast<volatile unsigned char*>(global + count - 1));
  });
  StoreQueue& queue = state.stores[static_cast<size_t>(current->index)];
  queue.stores.push_back(std::move(store));
  ++queue.uncommitted;
}

void read_shared(Store& store) {
  if (!store.data.empty()) return;
  Block& block = *current->block;
  const Transfer& transfer = store.transfer;
  if (hash_of(block, transfer) != store.hash) {
    fail(transfer.site, "cp.async.bulk: its source was changed before the store was waited for");
  }
  store.data.resize(transfer.bytes);
  for (size_t chunk = 0; chunk < transfer.bytes / kChunk; ++chunk) {
    memcpy(store.data.data() + chunk * kChunk,
           async_view(block, chunk_address(block, transfer, chunk)), kChunk);
  }
}

void write_global(const Store& store) {
  for_each_row(store.transfer, [&](unsigned char* global, size_t offset, size_t count) {
    const unsigned char* data = store.data.data() + offset;
    if (!store.add) {
      memcpy(global, data, count);
      return;
    }
    for (size_t n = 0; n < count; n += sizeof(float)) {
      float sum, term;
      memcpy(&sum, global + n, sizeof sum);
      memcpy(&term, data + n, sizeof term);
      sum += term;
      memcpy(global + n, &sum, sizeof sum);
    }
  });
}

}  // namespace

bool deliver_load(Block& block) {
  std::vector<Load>& loads = block.sm90.loads;
  if (!block.sm90.used || loads.empty()) return false;
  size_t chosen = 0;
  if (machine.order() == Order::kDescending) chosen = loads.size() - 1;
  if (machine.order() == Order::kRandom) chosen = machine.random() % loads.size();
  const Load load = std::move(loads[chosen]);
  loads.erase(loads.begin() + static_cast<long>(chosen));
  for (size_t chunk = 0; chunk < load.data.size() / kChunk; ++chunk) {
    unsigned char* const place = chunk_address(block, load.transfer, chunk);
    memcpy(place, load.data.data() + chunk * kChunk, kChunk);
    memcpy(async_view(block, place), place, kChunk);
  }
  complete_bytes(block, load.barrier, load.data.size(), load.transfer.step);
  return true;
}

void finish_stores(Block& block) {
  for (StoreQueue& queue : block.sm90.stores) {
    for (const Store& store : queue.stores) write_global(store);
    queue.stores.clear();
  }
}

}  // namespace tk::emulator

namespace tk::cuda {

using namespace emulator;

void load_tensor(void* shared, const TensorMap& map, uint64_t* barrier, const int* at, int rank,
                 Site site) {
  constexpr const char* kName = "cp.async.bulk.tensor";
  issue_load(tensor_transfer(map, shared, at, rank, kName, site), barrier, kName);
}

void load_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, Site site) {
  constexpr const char* kName = "cp.async.bulk";
  issue_load(bulk_transfer(shared, global, bytes, kName, site), barrier, kName);
}

void store_tensor(const TensorMap& map, const void* shared, const int* at, int rank, Site site) {
  const Transfer transfer = tensor_transfer(map, shared, at, rank, "cp.async.bulk.tensor", site);
  const uint64_t row = transfer.tensor.size[0] * cuda::element_bytes(transfer.tensor.type);
  if (row % kChunk != 0) {
    fail(site, "cp.async.bulk.tensor: rows of %d bytes; stores need a multiple of 16",
         static_cast<int>(row));
  }
  // Measured on an H200: an illegal instruction. Loads write zeros there instead.
  for (int n = 0; n < rank; ++n) {
    if (at[n] < 0) fail(site, "cp.async.bulk.tensor: a store at coordinate %d", at[n]);
  }
  issue_store(transfer, false);
}

void add_bulk(float* global, const void* shared, uint32_t bytes, Site site) {
  issue_store(bulk_transfer(shared, global, bytes, "cp.reduce.async.bulk", site), true);
}

void commit_stores() {
  StoreQueue& queue = sm90().stores[static_cast<size_t>(current->index)];
  queue.groups.push_back(queue.uncommitted);
  queue.uncommitted = 0;
}

void wait_stores(int pending, bool only_read, Site) {
  Block& block = *current->block;
  StoreQueue& queue = sm90().stores[static_cast<size_t>(current->index)];
  const auto left = static_cast<size_t>(pending);
  if (queue.groups.size() <= left) return;
  const size_t groups = queue.groups.size() - left;
  size_t count = 0;
  for (size_t g = 0; g < groups; ++g) count += queue.groups[g];
  for (size_t n = 0; n < count; ++n) {
    Store& store = queue.stores[n];
    read_shared(store);
    if (races.on) races.end_async(block, store.transfer.step, current->index);
    if (only_read) continue;
    write_global(store);
    if (races.on) races.end_async(block, store.write, current->index);
  }
  if (only_read) return;
  queue.stores.erase(queue.stores.begin(), queue.stores.begin() + static_cast<long>(count));
  queue.groups.erase(queue.groups.begin(), queue.groups.begin() + static_cast<long>(groups));
}

}  // namespace tk::cuda
