#include "ffi/cuda/call_order.h"

#include "check.h"

using namespace jax_ep;

constexpr int32_t kDeviceSms = 132;
constexpr EpGroupId kFirst = {1000, 0}, kSecond = {2000, 0}, kThird = {3000, 0};

// A call on XLA's stream of the device, or on another stream.
NotedCall on(int32_t device, int32_t num_sms = kDeviceSms, bool on_other_stream = false) {
  static const char streams[8][2] = {};
  return {device, &streams[device][on_other_stream], num_sms, kDeviceSms, 0, false, 0};
}

// Device 0 runs a call of the first EP group and then one of the second EP group, and device 1 the other way round.
size_t conflicts_of_two_orders(CallOrder& order, int32_t first_sms = kDeviceSms, int32_t second_sms = kDeviceSms,
                               bool on_two_streams = false) {
  size_t num_conflicts = order.note(kFirst, on(0, first_sms)).orders.size();
  num_conflicts += order.note(kSecond, on(0, second_sms, on_two_streams)).orders.size();
  num_conflicts += order.note(kSecond, on(1, second_sms, on_two_streams)).orders.size();
  num_conflicts += order.note(kFirst, on(1, first_sms)).orders.size();
  return num_conflicts;
}

void test_one_order() {
  CallOrder order;
  order.open(kFirst, {0, 1});
  order.open(kSecond, {0, 1});
  // Device 0 is 10 calls ahead.
  for (int32_t i = 0; i < 100; ++i) {
    EXPECT_EQ(order.note(i % 3 ? kFirst : kSecond, on(0)).orders.size(), size_t{0});
    if (i < 10) continue;
    EXPECT_EQ(order.note((i - 10) % 3 ? kFirst : kSecond, on(1)).orders.size(), size_t{0});
  }
}

// The order is noticed after two calls. There may never be a third one, if the host waits for the device.
void test_other_order_of_first_calls() {
  CallOrder order;
  order.open(kFirst, {0, 1});
  order.open(kSecond, {0, 1});
  for (int32_t device : {0, 1}) order.note(kFirst, on(device));  // a call that is complete
  NotedCall first_call = on(0);
  first_call.op = 5;
  EXPECT_EQ(order.note(kFirst, first_call).orders.size(), size_t{0});
  const auto conflicts = order.note(kSecond, on(1)).orders;
  EXPECT_EQ(conflicts.size(), size_t{1});
  EXPECT_EQ(conflicts.at(0).other.first, kFirst.first);
  EXPECT_EQ(conflicts.at(0).other_op, 5u);
  EXPECT_EQ(conflicts.at(0).other_device, 0);
  EXPECT_EQ(conflicts.at(0).number, uint64_t{1});
  EXPECT_EQ(conflicts.at(0).others_before, uint64_t{1});
  EXPECT_EQ(conflicts.at(0).others_before_there, uint64_t{2});
  EXPECT_EQ(conflicts.at(0).is_one_stream, true);
}

// One device makes all its calls before the other device makes any.
void test_other_order_of_late_calls() {
  CallOrder order;
  order.open(kFirst, {0, 1});
  order.open(kSecond, {0, 1});
  for (EpGroupId ep_group : {kFirst, kSecond, kFirst}) EXPECT_EQ(order.note(ep_group, on(0)).orders.size(), size_t{0});
  EXPECT_EQ(order.note(kFirst, on(1)).orders.size(), size_t{0});
  const auto conflicts = order.note(kFirst, on(1)).orders;
  EXPECT_EQ(conflicts.size(), size_t{1});
  EXPECT_EQ(conflicts.at(0).other.first, kSecond.first);
  EXPECT_EQ(conflicts.at(0).other_device, 0);
  EXPECT_EQ(conflicts.at(0).number, uint64_t{2});
  EXPECT_EQ(conflicts.at(0).others_before, uint64_t{0});
  EXPECT_EQ(conflicts.at(0).others_before_there, uint64_t{1});
}

// Device 0 runs a program with two calls, and then another program. Device 1 begins with the other program.
void test_other_order_of_runs() {
  CallOrder order;
  order.open(kFirst, {0, 1, 2});
  const auto note = [&](int32_t device, int64_t run_id) {
    NotedCall call = on(device);
    call.run_id = run_id;
    return order.note(kFirst, call).run;
  };
  for (int64_t run : {7, 7, 8}) EXPECT_EQ(note(0, run).has_value(), false);
  for (int64_t run : {7, 7, 8, 9}) EXPECT_EQ(note(2, run).has_value(), false);
  EXPECT_EQ(note(1, 7).has_value(), false);
  const auto conflict = note(1, 8);
  EXPECT_EQ(conflict.has_value(), true);
  EXPECT_EQ(conflict->other_device, 0);
  EXPECT_EQ(conflict->number, uint64_t{2});
  EXPECT_EQ(note(1, 8).has_value(), false);
  EXPECT_EQ(note(1, 10)->other_device, 2);  // which was the first to make the fourth call
}

void test_room_for_both() {
  const auto num_conflicts = [](int32_t first_sms, int32_t second_sms, bool on_two_streams) {
    CallOrder order;
    order.open(kFirst, {0, 1});
    order.open(kSecond, {0, 1});
    return conflicts_of_two_orders(order, first_sms, second_sms, on_two_streams);
  };
  EXPECT_EQ(num_conflicts(66, 66, true), size_t{0});
  EXPECT_EQ(num_conflicts(66, 67, true) > 0, true);
  EXPECT_EQ(num_conflicts(1, 1, false) > 0, true);  // one behind the other, whatever is free
}

void test_ep_groups_that_share_devices() {
  CallOrder order;
  order.open(kFirst, {0, 1, 2});
  order.open(kSecond, {1, 2, 3});
  order.open(kThird, {2, 4});                                     // one device in common: nothing to compare
  EXPECT_EQ(order.note(kFirst, on(0)).orders.size(), size_t{0});  // not of the second EP group
  EXPECT_EQ(order.note(kFirst, on(1)).orders.size(), size_t{0});
  EXPECT_EQ(order.note(kThird, on(2)).orders.size(), size_t{0});
  EXPECT_EQ(order.note(kSecond, on(3)).orders.size(), size_t{0});  // not of the first EP group
  EXPECT_EQ(order.note(kFirst, on(2)).orders.size(), size_t{0});
  EXPECT_EQ(order.note(kSecond, on(2)).orders.size(), size_t{0});
  EXPECT_EQ(order.note(kFirst, on(1)).orders.size(), size_t{1});
}

void test_ignored_calls() {
  CallOrder order;
  order.open(kFirst, {0, 1});
  EXPECT_EQ(conflicts_of_two_orders(order), size_t{0});  // the second EP group is not open
  order.open(kSecond, {0, 1});
  order.note(kFirst, on(0));
  order.note(kSecond, on(1));
  order.close(kSecond.first);
  EXPECT_EQ(order.note(kFirst, on(1)).orders.size(), size_t{0});

  CallOrder with_graphs;
  with_graphs.open(kFirst, {0, 1});
  with_graphs.open(kSecond, {0, 1});
  NotedCall captured = on(0);
  captured.is_in_graph = true;
  with_graphs.note(kSecond, captured);
  EXPECT_EQ(conflicts_of_two_orders(with_graphs), size_t{0});

  CallOrder one_device;
  one_device.open(kFirst, {0});
  EXPECT_EQ(one_device.note(kFirst, on(0)).orders.size(), size_t{0});
}

int main() {
  test_one_order();
  test_other_order_of_first_calls();
  test_other_order_of_late_calls();
  test_other_order_of_runs();
  test_room_for_both();
  test_ep_groups_that_share_devices();
  test_ignored_calls();
  return check::exit_status();
}
